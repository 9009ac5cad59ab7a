// Conversations, which this browser keeps: each is one value of its storage, as JSON.
import { button, download, h, problem } from "./dom.js";
import { picturesOf, textOf } from "./pictures.js";

const PREFIX = "servd.conversation.";
const MAX_CHARACTERS = 2_000_000; // of all; browsers have room for a few millions
const FULL = "This conversation is not kept: the conversations in this browser take all of the "
  + "2 MB that they may. Delete one of them; until then, export this one to keep it.";

const keys = () => {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return []; // the browser has no storage for this page
  }
};

/** A conversation; undefined if there is none. */
export function load(id) {
  try {
    const found = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(found?.messages) ? found : undefined;
  } catch {
    return undefined;
  }
}

/** Keep a conversation, or throw an error that says why not. */
export function save(conversation) {
  const key = PREFIX + conversation.id;
  const value = JSON.stringify(conversation);
  const others = keys().filter((other) => other !== key);
  const used = others.reduce((sum, other) => sum + localStorage.getItem(other).length, 0);
  if (used + value.length > MAX_CHARACTERS) throw new Error(FULL);
  try {
    localStorage.setItem(key, value);
  } catch (error) {
    if (error.name === "QuotaExceededError") throw new Error(FULL);
    throw new Error(`This browser keeps no conversation: ${error.message}`);
  }
}

export const titleOf = (text) => text.trim().replace(/\s+/g, " ").slice(0, 60) || "Untitled";

/** The list of conversations, and what can be done with them. `current` returns the one that is
 * shown, `onDelete` is told which one will go. */
export function conversationList(current, onDelete) {
  const list = h("ul");
  const draw = () => {
    const all = keys().map((key) => load(key.slice(PREFIX.length))).filter(Boolean)
      .sort((a, b) => b.changed - a.changed);
    list.replaceChildren(...all.map(item));
    if (!all.length) list.append(h("li.hint", {}, "What you write is kept in this browser only."));
  };

  function item({ id, title }) {
    const isCurrent = id === current().id;
    const row = h("li", {},
      h("a", { href: `#/playground/${id}`, "aria-current": isCurrent && "page" }, title),
      button("Rename", () => row.replaceWith(renaming(id, title)),
        { class: "quiet", "aria-label": `Rename ${title}` }),
      deleting(id, title));
    return row;
  }

  /** A button to press twice. */
  function deleting(id, title) {
    const reset = () => press.replaceChildren("Delete");
    const press = button("Delete", async () => {
      if (press.textContent === "Delete") return press.replaceChildren("Sure?");
      await onDelete(id);
      localStorage.removeItem(PREFIX + id);
      draw();
    }, { class: "quiet", "aria-label": `Delete ${title}`, blur: reset });
    return press;
  }

  function renaming(id, title) {
    const field = h("input", { value: title, "aria-label": `New name of ${title}` });
    const rename = (event) => {
      event.preventDefault();
      const found = id === current().id ? current() : load(id);
      try {
        if (found) save(Object.assign(found, { title: titleOf(field.value) }));
        draw();
      } catch (error) {
        list.append(h("li", {}, problem(error)));
      }
    };
    setTimeout(() => field.select());
    const leave = (event) => event.key === "Escape" && draw();
    return h("li", {}, h("form", { submit: rename, keydown: leave }, field,
      h("button.quiet", {}, "Save")));
  }

  const name = () => current().title.replace(/[^\p{L}\p{N}]+/gu, "-").toLowerCase();
  const exports = h("p.actions", {}, h("span.hint", {}, "Export as"),
    button("JSON", () => download(`${name()}.json`, JSON.stringify(current(), null, 2))),
    button("Markdown", () => download(`${name()}.md`, markdownOf(current()))));
  window.addEventListener("storage", draw); // another page of this browser changed something
  draw();
  return { root: h("div.conversations", {}, list, exports), draw };
}

/** A fence that is longer than all in a text. */
const fenced = (text) => {
  const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((run) => run.length));
  return `${"`".repeat(longest + 1)}\n${text}\n${"`".repeat(longest + 1)}`;
};

function markdownOf({ title, model, system, messages }) {
  const parts = [`# ${title}`];
  if (system) parts.push("## System prompt", system);
  const heads = { user: "You", assistant: model, tool: "Result of a tool" };
  for (const { role, content, tool_calls: calls = [] } of messages) {
    parts.push(`## ${heads[role]}`);
    picturesOf(content).forEach((url, i) => parts.push(`![Picture ${i + 1}](${url})`));
    const text = textOf(content);
    if (text) parts.push(role === "tool" ? fenced(text) : text);
    for (const { function: called } of calls) {
      parts.push(fenced(`${called.name}(${called.arguments})`));
    }
  }
  return `${parts.join("\n\n")}\n`;
}
