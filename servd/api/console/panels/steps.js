// What the batches of the last steps were made of.
import { clock, counted, facts, h, short, span } from "../dom.js";
import { bars, graph, scaleOf } from "../graph.js";

export const title = "Recent steps";
export const order = 4;

export default function panel() {
  const draw = graph("Tokens of each step");
  return ({ steps, now }) => {
    if (!steps.length) return h("p.hint", {}, "No step has run yet.");
    const top = scaleOf(Math.max(...steps.map((step) => step.num_tokens)));
    const mean = steps.reduce((sum, step) => sum + took(step), 0) / steps.length;
    const requests = steps.reduce((sum, step) => sum + step.num_requests, 0) / steps.length;
    const ago = (step) => Math.max(0, now - step.end_ms);
    return [
      facts({ "Requests per step": short(requests), "Time per step": span(mean) }, "big"),
      draw(bars(steps.map((step) => ({
        prompt: step.num_prompt_tokens / top,
        decode: (step.num_tokens - step.num_prompt_tokens) / top,
      }))), steps.length, top, [steps[0], steps.at(-1)].map((step) => `${span(ago(step))} ago`),
      (i) => `${clock(Date.now() - ago(steps[i]))}: ${described(steps[i])}`),
      h("p.hint", {}, h("i.key.decode"), " tokens of answers, drafts included ",
        h("i.key.prompt"), " tokens of prompts")];
  };
}

const took = (step) => step.end_ms - step.begin_ms;

const described = (step) => `step ${step.step} of engine ${step.engine}, `
  + `${counted(step.num_tokens, "token")}, ${step.num_prompt_tokens} of prompts, `
  + `${counted(step.num_requests, "request")}, ${span(took(step))}`;
