// What the batches of the last steps were made of.
import { bars, counted, facts, h, short, span } from "../dom.js";

export const title = "Recent steps";
export const order = 4;

export default () => ({ steps }) => {
  if (!steps.length) return h("p.hint", {}, "No step has run yet.");
  const most = Math.max(...steps.map((step) => step.num_tokens), 1);
  const mean = steps.reduce((sum, step) => sum + took(step), 0) / steps.length;
  const requests = steps.reduce((sum, step) => sum + step.num_requests, 0) / steps.length;
  return [
    facts({ "Requests per step": short(requests), "Time per step": span(mean) }, "big"),
    bars(`Tokens of each step, at most ${most}`, steps.map((step) => [described(step), {
      prompt: step.num_prompt_tokens / most,
      decode: (step.num_tokens - step.num_prompt_tokens) / most,
    }])),
    h("p.hint", {}, h("i.key.decode"), " tokens of answers, drafts included ", h("i.key.prompt"),
      ` tokens of prompts; the highest of ${counted(steps.length, "bar")} is `
      + counted(most, "token"))];
};

const took = (step) => step.end_ms - step.begin_ms;

const described = (step) => `Engine ${step.engine}, step ${step.step}: `
  + `${counted(step.num_tokens, "token")} of ${counted(step.num_requests, "request")} `
  + `in ${span(took(step))}`;
