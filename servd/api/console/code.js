// A chat request as code that people can take away.
import { needsKey, url } from "./api.js";
import { button, copyButton, h } from "./dom.js";

const MAX_ARGUMENT = 100_000; // characters

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(body) {
  const options = [`-H 'Content-Type: application/json'`];
  if (needsKey()) options.push(`-H "Authorization: Bearer $SERVD_API_KEY"`);
  const data = JSON.stringify(body, null, 2);
  // Linux takes no argument as long as a picture.
  options.push(data.length < MAX_ARGUMENT ? `-d ${quoted(data)}` : `-d @- <<'END'\n${data}\nEND`);
  return [`curl -N ${quoted(url("v1/chat/completions"))}`, ...options].join(" \\\n  ");
}

/** A JSON value as Python writes it. */
function literal(value, indent = "    ") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const parts = Object.entries(value).map(([name, item]) =>
    (Array.isArray(value) ? "" : `${JSON.stringify(name)}: `) + literal(item, inner));
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = open + parts.join(", ") + close;
  if (line.length < 70) return line;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}

// Fields that OpenAI's client does not know.
const EXTENSIONS = ["top_k", "min_p", "repetition_penalty", "return_progress"];

export function python(body) {
  const own = Object.entries(body).filter(([name]) => !EXTENSIONS.includes(name));
  const extra = Object.entries(body).filter(([name]) => EXTENSIONS.includes(name));
  if (extra.length) own.push(["extra_body", Object.fromEntries(extra)]);
  const key = needsKey() ? 'os.environ["SERVD_API_KEY"]' : '"none"';
  return `${needsKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(url("v1"))}, api_key=${key})
stream = client.chat.completions.create(
${own.map(([name, value]) => `    ${name}=${literal(value)},\n`).join("")})
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

/** Show code in a dialog, to read and to copy. */
export function showCode(title, code) {
  const text = h("pre", { tabindex: 0 }, code);
  const copy = copyButton(() => code, text, { class: "primary", autofocus: true });
  const dialog = h("dialog.code", { "aria-label": title, close: () => dialog.remove() },
    h("h2", {}, title), text,
    h("p.actions", {}, button("Close", () => dialog.close()), copy));
  document.body.append(dialog);
  dialog.showModal();
}
