// One answer of the model, while it comes and afterwards.
import { curl, python, showCode } from "./code.js";
import { button, counted, h, problem, short, span } from "./dom.js";
import { Markdown } from "./markdown.js";
import { timeline } from "./timeline.js";
import { explainTokens, Tokens } from "./tokens.js";

const MIN_PAUSE = 30; // milliseconds between two drawings
const IDLE_SHARE = 4; // a drawing that takes long is followed by this many times its time without

export class Answer {
  /** `around` is given a function that draws, and calls it. */
  constructor(model, around = (draw) => draw()) {
    this.text = h("div.text.markdown");
    this.root = h("article.turn.assistant", {}, h("h2", {}, model), this.text);
    this.around = around;
    this.content = "";
    this.calls = [];
    this.began = performance.now();
    this.tokens = new Tokens();
    this.markdown = new Markdown(this.text, (text, at) => this.tokens.write(text, at));
    this.pause = MIN_PAUSE;
    explainTokens(this.text);
  }

  /** An answer that was kept. */
  static from(model, { content, tool_calls: calls = [] }) {
    const answer = new Answer(model);
    answer.write(content ?? "");
    answer.calls = calls.map(({ id, function: called }) => ({ id, ...called }));
    return answer;
  }

  /** Take in a chunk of the stream. */
  add({ id, choices, usage, prompt_progress: progress }) {
    this.id = id;
    this.usage = usage ?? this.usage;
    this.reading ??= h("p.hint", { role: "status" });
    this.reading.textContent = progress
      ? `Reading the prompt: ${Math.floor((100 * progress.processed) / progress.total)} %` : "";
    if (progress) this.text.before(this.reading);
    else this.reading.remove();
    if (!choices.length) return;
    const [{ delta, logprobs, finish_reason: finish }] = choices;
    this.finish = finish ?? this.finish;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    const text = delta.content ?? "";
    if (reasoning || text || delta.tool_calls) this.first ??= performance.now();
    if (reasoning) this.around(() => this.reasoning().append(reasoning));
    if (text) this.write(text, logprobs?.content);
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { name: "", arguments: "" });
      call.id = part.id ?? call.id;
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
  }

  write(text, entries) {
    this.content += text;
    this.tokens.add(text, entries);
    this.markdown.append(text);
    this.timer ??= setTimeout(() => this.around(() => this.draw()), this.pause);
  }

  draw(isWhole = false) {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    this.markdown.draw(isWhole);
    this.pause = Math.max(MIN_PAUSE, IDLE_SHARE * (performance.now() - began));
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

  /** The answer has ended: show its figures, and what can be done with it. `results` are those of
   * its calls, where they are known. */
  close(again, goOn, results = []) {
    this.draw(true);
    const token = this.text.querySelector(".token");
    if (token) {
      token.tabIndex = 0;
      this.text.setAttribute("role", "group");
      this.text.setAttribute("aria-label", "Answer; arrow keys go through its tokens");
    }
    if (this.calls.length) {
      this.root.append(results.length ? this.callList(results) : this.callForm(goOn));
    }
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

  callList(results) {
    return h("div.calls", {}, this.calls.map((call) => h("div.call", {},
      h("code", {}, `${call.name}(${call.arguments})`),
      h("div", {}, results.find((result) => result.tool_call_id === call.id)?.content))));
  }
}
