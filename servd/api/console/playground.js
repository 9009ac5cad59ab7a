// A conversation with the model.
import { chosenModel, events, json } from "./api.js";
import { curl, python, showCode } from "./code.js";
import { button, counted, h, problem, short, span } from "./dom.js";
import { requestBody, settingsForm } from "./settings.js";
import { timeline } from "./timeline.js";
import { explainTokens, tokenWriter } from "./tokens.js";

const IDEAS = ["What is servd?", "Name three colours.", "Write a haiku about a library."];

export default function playground(root) {
  const messages = []; // as the API takes them
  let form, running = null; // an AbortController while an answer comes
  const log = h("div.log", { role: "log", "aria-label": "Conversation" });
  const input = h("textarea", {
    rows: 1, placeholder: "Write a message", "aria-label": "Message", keydown: onKey,
  });
  const sendButton = button("Send", onSend, { class: "primary" });
  const composer = h("div.composer", {}, input, sendButton);
  const aside = h("details.aside", {}, h("summary", {}, "Settings"));
  const restart = button("New chat", clear, { class: "quiet" });
  root.append(h("div.chat", {}, log, h("div.bottom", {}, composer,
    h("p.hint", {}, "Enter sends, Shift + Enter begins a new line, Esc stops. ", restart))), aside);
  const wide = matchMedia("(min-width: 60rem)");
  wide.addEventListener("change", () => (aside.open = wide.matches));
  aside.open = wide.matches;
  begin();

  async function begin() {
    try {
      const { data } = await json("v1/models");
      form = settingsForm(chosenModel() ? [chosenModel()] : data.map((model) => model.id));
      aside.append(form);
      clear();
    } catch (error) {
      log.replaceChildren(problem(error));
    }
  }

  function clear() {
    running?.abort();
    messages.length = 0;
    const ideas = IDEAS.map((idea) => button(idea, () => ask(idea)));
    log.replaceChildren(h("div.empty", {}, h("h2", {}, form.elements.model.value),
      h("p", {}, "Ask something. Point at a word of the answer to see how sure the model was."),
      h("p.ideas", {}, ideas)));
    input.focus();
  }

  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) onSend();
    }
  }

  root.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());

  function onSend() {
    if (running) running.abort();
    else if (input.value.trim() && form) {
      const text = input.value;
      input.value = "";
      ask(text);
    }
  }

  function ask(text) {
    if (!messages.length) log.replaceChildren();
    messages.push({ role: "user", content: text });
    log.append(h("article.turn.user", {}, h("h2", {}, "You"), h("div.text", {}, text)));
    return answer();
  }

  /** Have the conversation continued by the model. */
  async function answer() {
    const turn = new Answer(form.elements.model.value);
    log.append(turn.root);
    const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    const follow = () => (log.scrollTop = log.scrollHeight);
    follow();
    running = new AbortController();
    sendButton.textContent = "Stop";
    log.setAttribute("aria-busy", "true");
    const before = messages.length;
    try {
      turn.body = requestBody(form, messages);
      for await (const event of events("v1/chat/completions", turn.body, running.signal)) {
        const stays = isAtEnd();
        turn.add(event);
        if (stays) follow();
      }
    } catch (error) {
      if (error.name === "AbortError") turn.finish = "stopped by you";
      else turn.root.append(problem(error));
    } finally {
      running = null;
      sendButton.textContent = "Send";
      log.removeAttribute("aria-busy");
    }
    messages.push(turn.message());
    const again = () => {
      messages.length = before;
      while (log.lastElementChild !== turn.root) log.lastElementChild.remove();
      turn.root.remove();
      answer();
    };
    turn.close(again, (results) => {
      messages.push(...results);
      answer();
    });
    follow();
    input.focus();
  }

  return { show: () => input.focus() };
}

/** One answer of the model, while it comes and afterwards. */
class Answer {
  constructor(model) {
    this.text = h("div.text");
    this.root = h("article.turn.assistant", {}, h("h2", {}, model), this.text);
    this.content = "";
    this.calls = [];
    this.began = performance.now();
    this.write = tokenWriter();
    explainTokens(this.text);
  }

  /** Take in a chunk of the stream. */
  add({ id, choices, usage }) {
    this.id = id;
    this.usage = usage ?? this.usage;
    if (!choices.length) return;
    const [{ delta, logprobs, finish_reason: finish }] = choices;
    this.finish = finish ?? this.finish;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    const text = delta.content ?? "";
    if (reasoning || text || delta.tool_calls) this.first ??= performance.now();
    if (reasoning) this.reasoning().append(reasoning);
    this.content += text;
    if (text && logprobs?.content) this.text.append(...this.write(text, logprobs.content));
    else this.text.append(text);
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { name: "", arguments: "" });
      call.id = part.id ?? call.id;
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
  }

  reasoning() {
    this.aside ??= h("div.text");
    if (!this.aside.isConnected) {
      const head = h("summary", {}, "Reasoning");
      this.text.before(h("details.reasoning", { open: true }, head, this.aside));
    }
    return this.aside;
  }

  /** What the model said, for the requests that follow. */
  message() {
    const calls = this.calls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
    const message = { role: "assistant", content: this.content };
    return calls.length ? { ...message, tool_calls: calls } : message;
  }

  /** The answer has ended: show its figures, and what can be done with it. */
  close(again, goOn) {
    const token = this.text.querySelector(".token");
    if (token) {
      token.tabIndex = 0;
      this.text.setAttribute("role", "group");
      this.text.setAttribute("aria-label", "Answer; arrow keys go through its tokens");
    }
    if (this.calls.length) this.root.append(this.callForm(goOn));
    const place = h("div");
    const actions = [button("Try again", again)];
    if (this.body) {
      actions.push(button("curl", () => showCode("This request with curl", curl(this.body))));
      actions.push(button("Python", () => showCode("This request in Python", python(this.body))));
    }
    if (this.id) {
      const toggle = button("Timeline", async () => {
        const opens = toggle.getAttribute("aria-expanded") !== "true";
        toggle.setAttribute("aria-expanded", opens);
        place.replaceChildren(opens ? await timeline(this.id).catch(problem) : "");
      }, { "aria-expanded": "false" });
      actions.unshift(toggle);
    }
    const figures = h("p", {}, this.figures());
    this.root.append(h("footer", {}, figures, h("p.actions", {}, actions)), place);
  }

  figures() {
    const tokens = this.usage?.completion_tokens;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const figures = [];
    if (this.first) figures.push(`first token after ${span(this.first - this.began)}`);
    if (tokens) figures.unshift(counted(tokens, "token"));
    const seconds = (performance.now() - this.first) / 1000;
    if (tokens > 1) figures.push(`${short((tokens - 1) / seconds)} tokens/s`);
    if (this.usage) figures.push(`prompt ${counted(this.usage.prompt_tokens, "token")}` +
      (cached ? `, ${cached} of them cached` : ""));
    if (this.finish && this.finish !== "stop") {
      figures.push(this.finish === "length" ? "cut off: longest answer reached" : this.finish);
    }
    return figures.join(" · ");
  }

  /** The calls that the model makes, and fields for what they return. */
  callForm(goOn) {
    const results = this.calls.map(() => h("textarea", { rows: 2, required: true }));
    return h("form.calls", { submit: (event) => {
      event.preventDefault();
      event.target.querySelector("button").remove();
      goOn(this.calls.map((call, i) => ({
        role: "tool", tool_call_id: call.id, content: results[i].value,
      })));
    } },
      this.calls.map((call, i) => h("div.call", {},
        h("code", {}, `${call.name}(${call.arguments})`),
        h("label", {}, "What it returns", results[i]))),
      h("button.primary", {}, this.calls.length > 1 ? "Send the results" : "Send the result"));
  }
}
