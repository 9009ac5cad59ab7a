// The controls beside the conversation, and the request that they make.
import { button, h } from "./dom.js";

const NUMBERS = [
  ["temperature", "Temperature", "0 always takes the likeliest token; more is more varied.", 0.1],
  ["top_p", "Top-p", "Only the likeliest tokens that reach this probability together.", 0.05],
  ["top_k", "Top-k", "Only this many of the likeliest tokens.", 1],
  ["min_p", "Min-p", "Only tokens with this share of the likeliest token's probability.", 0.05],
  ["max_tokens", "Longest answer", "In tokens.", 1],
  ["frequency_penalty", "Frequency penalty", "Above 0: fewer repetitions.", 0.1],
  ["seed", "Seed", "The same seed gives the same answer.", 1, "random"],
];
const MAX_TOKENS = 4096; // of an answer, or half of the context: a small model may not find an end
const TOOLS = [{ type: "function", function: {
  name: "get_weather", description: "The weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
} }];
const SCHEMA = { type: "object", required: ["name", "age"], properties: {
  name: { type: "string" }, age: { type: "integer", minimum: 0, maximum: 150 },
} };

const TINT = "servd.tint"; // in the storage of the browser, which may have none for this page
const isTinted = () => {
  try {
    return localStorage.getItem(TINT) === "true";
  } catch {
    return false;
  }
};
const keepTint = ({ target }) => {
  try {
    localStorage.setItem(TINT, target.checked);
  } catch { /* until the page is closed */ }
};

/** The form; `names` are those of the model, and `card` is its entry in v1/models. */
export function settingsForm(names, card) {
  const half = Math.floor(card?.max_model_len / 2) || MAX_TOKENS; // a model may be asleep
  const defaults = { max_tokens: Math.min(MAX_TOKENS, half), ...card?.default_parameters };
  const number = ([name, label, hint, step, empty = "auto"]) => h("label.number", {},
    h("span", {}, label),
    h("input", { name, type: "number", step, placeholder: defaults[name] ?? empty }),
    h("small.hint", {}, hint));
  const document = (name, label, hint, example) => {
    const text = h("textarea", { name, rows: 6, spellcheck: "false", "aria-label": label });
    const fill = () => {
      text.value = JSON.stringify(example, null, 2);
      text.focus();
    };
    return h("details", {}, h("summary", {}, label), h("p.hint", {}, hint), text,
      button("Insert an example", fill));
  };
  return h("form.settings", { "aria-label": "Settings", submit: (event) => event.preventDefault() },
    h("label", { class: names.length < 2 && "gone" }, "Model",
      h("select", { name: "model" }, names.map((name) => h("option", {}, name)))),
    h("label", {}, "System prompt",
      h("textarea", { name: "system", rows: 3, placeholder: "How the model should answer" })),
    h("fieldset", {}, h("legend", {}, "Sampling"), NUMBERS.map(number),
      h("label.number", {}, h("span", {}, "Stop at"), h("input", { name: "stop" }),
        h("small.hint", {}, "The answer ends before this text."))),
    h("label.check", {}, h("input", { type: "checkbox", name: "logprobs", checked: true }),
      "Token probabilities"),
    h("label.check", {}, h("input", { type: "checkbox", name: "tint", checked: isTinted(),
      change: keepTint }), "Tint tokens by probability"),
    document("tools", "Tools", "Functions that the model may call, as OpenAI's list of tools. You "
      + "type what they return.", TOOLS),
    document("schema", "JSON schema", "The answer will be JSON of exactly this form.", SCHEMA));
}

/** The body of a chat request. A SyntaxError names the field that is no JSON. */
export function requestBody(form, messages) {
  const fields = Object.fromEntries(new FormData(form));
  const system = fields.system.trim();
  const body = {
    model: fields.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
  };
  fields.max_tokens ||= form.elements.max_tokens.placeholder;
  for (const [name] of NUMBERS) if (fields[name] !== "") body[name] = Number(fields[name]);
  if (fields.stop) body.stop = fields.stop;
  if (fields.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (fields.tools.trim()) body.tools = parsed(fields.tools, "Tools");
  if (fields.schema.trim()) {
    const schema = parsed(fields.schema, "JSON schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
}

function parsed(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`“${label}” is not JSON: ${error.message}`);
  }
}
