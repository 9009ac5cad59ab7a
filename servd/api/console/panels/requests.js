// Who runs and who waits.
import { count, counted, facts, h, span, table } from "../dom.js";
import { requestLink } from "../timeline.js";

export const title = "Requests now";
export const order = 2;

const SHOWN = 8;

export default () => ({ metrics, requests }) => [
  facts({
    Running: count(metrics.sum("vllm:num_requests_running")),
    Waiting: count(metrics.sum("vllm:num_requests_waiting")),
    Preemptions: count(metrics.sum("vllm:num_preemptions_total")),
  }, "big"),
  requests.length ? table("Running requests", ["Request", "For", "Tokens"],
    requests.slice(0, SHOWN).map((request) => [requestLink(request.id), span(request.wall_ms),
      `${count(request.num_prompt_tokens)} + ${count(request.num_output_tokens)}`]))
    : h("p.hint", {}, "Nothing runs."),
  h("p.hint", { hidden: requests.length <= SHOWN },
    `and ${counted(requests.length - SHOWN, "other")}`),
];
