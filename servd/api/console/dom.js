// Elements and how values are written. Text is only ever text: what a model or a client wrote
// cannot become markup.

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

/** An element: h("p.hint", { id: "a" }, "text", child). Functions are listeners. */
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const all = classes.length ? { class: classes.join(" "), ...attributes } : attributes;
  return build(document.createElement(name), all, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

/** A button that does something here. */
export const button = (label, click, attributes = {}) =>
  h("button", { type: "button", click, ...attributes }, label);

/** Add many children, for which a call has no room. */
export function fill(element, children) {
  for (const child of children) element.append(child);
  return element;
}

/** A button that copies a text, which `element` shows. */
export function copyButton(text, element, attributes = {}) {
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(element); // without HTTPS a browser lets no page write
      copy.textContent = "Selected: press Ctrl+C";
    }
  }, attributes);
  return copy;
}

/** Have the browser save a text as a file. */
export function download(name, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text])), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (n) => (n == null ? "–" : plain.format(n));

/** "1 token", "12 tokens". */
export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** Three digits: 12.3, 123, 1,234. */
export const short = (n) =>
  n == null || Number.isNaN(n) ? "–" : n >= 100 ? plain.format(n) : String(+n.toPrecision(3));

/** A time span, of milliseconds. */
export function span(ms) {
  if (ms == null || Number.isNaN(ms)) return "–";
  if (ms < 0.0005) return "0";
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1000) return `${short(ms)} ms`;
  return ms < 60000 ? `${short(ms / 1000)} s` : `${short(ms / 60000)} min`;
}

/** The time of day of a Unix time in milliseconds. */
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

export const percent = (share) =>
  share == null ? "–" : `${(share * 100).toFixed(share < 0.1 ? 2 : 1)} %`;

/** Text whose spaces and line ends can be seen. */
export const visible = (text) =>
  text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

/** What went wrong, for people. */
export const problem = (error) => h("p.problem", { role: "alert" }, error.message);

/** Names and values; those that are not known are left out. */
export const facts = (entries, style = "") => h("dl.facts", { class: `facts ${style}` },
  Object.entries(entries).filter(([, value]) => value != null).map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value))));

export const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;

/** A table whose rows are lists of cells. On a narrow screen, rows of many cells become cards. */
export function table(label, heads, rows) {
  const head = h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)));
  const body = rows.map((row) => h("tr", {}, row.map((cell, i) =>
    h("td", { "data-head": heads[i], class: cell === "–" && "none" }, cell))));
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": label },
    h("table", { class: heads.length > 3 && "cards" }, h("thead", {}, head), h("tbody", {}, body)));
}
