// Who runs and who waits.
import { count, counted, facts, h, span, table } from "../dom.js";
import { outcomeOf, requestLink } from "../timeline.js";

export const title = "Requests now";
export const order = 2;

const SHOWN = 8;

const ENDED = 5;

export default () => ({ metrics, requests, ended }) => [
  facts({
    Running: count(metrics.sum("vllm:num_requests_running")),
    Waiting: count(metrics.sum("vllm:num_requests_waiting")),
    Preemptions: count(metrics.sum("vllm:num_preemptions_total")),
  }, "big"),
  requests.length ? table("Running requests", ["Request", "For", "Tokens"],
    requests.slice(0, SHOWN).map((request) => [requestLink(request.id), span(request.wall_ms),
      `${count(request.num_prompt_tokens)} + ${count(request.num_output_tokens)}`]))
    : h("p.hint", {}, "Nothing runs."),
  ended.length ? table("Requests that have ended", ["Ended last", "Outcome", "Took"],
    ended.slice(0, ENDED).map((request) => [requestLink(request.id), outcomeOf(request),
      span(request.wall_ms)])) : "",
  h("p.hint", { hidden: requests.length <= SHOWN },
    `and ${counted(requests.length - SHOWN, "other")}`),
];
