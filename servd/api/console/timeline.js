// Where the time of one request went, drawn.
import { json } from "./api.js";
import { h, span } from "./dom.js";

const MEANING = {
  parsed: "Reading the request",
  templated: "Chat template",
  tokenised: "Text to tokens",
  sent: "Handing over to the engine",
  queued: "On the way to the engine",
  scheduled: "Waiting in the queue",
  preempted: "Computing, then preempted",
  first_token: "Prompt to first token",
  finished: "All further tokens",
  detokenised: "Last tokens to text",
  written: "Writing the answer",
  done: "Closing",
};
const COMPUTES = ["first_token", "finished"];

/** The waterfall of a request, by the id of its answer. */
export async function timeline(id) {
  const { wall_ms: wall, stages } = await json(`debug/requests/${encodeURIComponent(id)}`);
  const rows = stages.filter((stage) => stage.took_ms > 0).map((stage) => h("li", {
    class: COMPUTES.includes(stage.stage) && "computes",
    "--from": (stage.at_ms - stage.took_ms) / wall,
    "--share": stage.took_ms / wall,
  }, h("span", {}, MEANING[stage.stage] ?? stage.stage), h("span.track", { "aria-hidden": "true" }),
    h("span.figure", {}, span(stage.took_ms))));
  return h("section.timeline", { "aria-label": "Timeline" },
    h("p.hint", {}, `${span(wall)} from the request to the last byte.`), h("ol", {}, rows));
}
