// Requests to this server. The API key lives in this module only.
import { h } from "./dom.js";

let key = "";
let model = ""; // of several, the one that all views are about
let asking = null; // while the user is asked for a key: all requests wait for one answer

export const needsKey = () => key !== "";
export const chosenModel = () => model;
export const choose = (name) => (model = name);

/** What the server says is wrong. */
async function failure(response) {
  const reply = await response.json().catch(() => null);
  const error = new Error(reply?.error?.message ?? `The server answered ${response.status}.`);
  return Object.assign(error, { code: reply?.error?.code });
}

/** A whole URL, for people to copy. */
export const url = (path) => new URL(path, document.baseURI.split("#")[0]).href;

/** Send a request; with a body, POST it as JSON. Asks for an API key where one is needed. */
export async function send(path, { body, signal, accept } = {}) {
  for (;;) {
    const used = key;
    const headers = { accept: accept ?? "application/json" };
    if (key) headers.authorization = `Bearer ${key}`;
    if (body) headers["content-type"] = "application/json";
    const init = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
    if (body) init.body = JSON.stringify(body);
    const target = new URL(url(path));
    if (model) target.searchParams.set("model", model);
    let response;
    try {
      response = await fetch(target, init);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server cannot be reached. Is it still running?");
    }
    if (response.status === 401) {
      if (used === key) await (asking ??= askForKey(used !== "").finally(() => (asking = null)));
      continue;
    }
    return response;
  }
}

/** The JSON of a reply, which must be a good one. */
export async function json(path, options = {}) {
  const response = await send(path, options);
  if (response.ok) return response.json();
  throw await failure(response);
}

/** How the server is; a 503 would be an error in the log of the browser. */
export const health = () => json("health?always_ok=true");

/** The events of a streamed reply, parsed. */
export async function* events(path, body, signal) {
  const response = await send(path, { body, signal, accept: "text/event-stream" });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.match(/^data: ?(.*)$/m)?.[1];
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Show the dialog until a key has been typed. */
function askForKey(wasWrong) {
  const dialog = document.getElementById("key");
  const form = dialog.querySelector("form");
  dialog.querySelector(".problem")?.remove();
  if (wasWrong) {
    const problem = h("p.problem", { role: "alert" }, "That key is not valid here.");
    document.getElementById("key-why").after(problem);
  }
  form.reset();
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener("submit", () => {
      key = form.elements.key.value.trim();
      form.reset();
      resolve();
    }, { once: true });
  });
}
