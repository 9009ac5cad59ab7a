// Where the time of one request went, drawn: a row for each phase.
import { json } from "./api.js";
import { button, count, counted, download, h, short, span, table } from "./dom.js";
import { remedy } from "./remedies.js";

const OWN = {
  parse: "Reading the request", picture_fetch: "Fetching pictures",
  picture_decode: "Decoding pictures", picture_process: "Pictures to tensors",
  template: "Chat template", tokenise: "Text to tokens", picture_encode: "Encoding pictures",
  grammar_check: "Checking the schema", prefill: "Computing its prompt",
  decode: "Computing its tokens", detokenise: "Tokens to text", write: "Writing the answer",
};
const WAITS = {
  model_load: "Loading its model", adapter_load: "Loading its adapter", wake_up: "Engine woke up",
  picture_queue: "Queue: other pictures", event_loop: "API process busy",
  ipc: "Between processes", grammar_compile: "Compiling the schema",
  queue_step: "Queue: a step was running", queue_slots: "Queue: all slots taken",
  queue_blocks: "Queue: KV cache full", queue_budget: "Queue: steps were full",
  queue_adapters: "Queue: other adapters", neighbour_prefill: "Another request's prompt",
  preemption: "Preempted", tier_read: "Reading cached blocks", swapped: "Swapped out",
  engine_loop: "Engine between steps", engine_restart: "Engine restarted",
  rejected_drafts: "Rejected drafts", stalled_worker: "Worker stalled", start_up: "Server starting",
  slow_reader: "Client reads slowly", unaccounted: "Unaccounted",
};
const COMPUTES = ["picture_encode", "prefill", "decode"];
// Shares of the time of a request from which on there is a remedy beside a phase.
const LONG_WAIT = 0.05;
const LONG_WORK = 0.5;

/** What a phase is called. */
export const phaseName = (phase) => OWN[phase] ?? WAITS[phase] ?? phase;

/** The breakdown of a request, by the id of its answer; `full` with its neighbours and steps. */
export async function timeline(id, full = false) {
  const path = `v1/requests/${encodeURIComponent(id)}/timeline`;
  const found = await json(path);
  const parts = [h("p", {}, found.explanation), waterfall(found)];
  if (found.prefix_cache) parts.push(prefix(found.prefix_cache));
  if (full) parts.push(...neighbours(found), ...steps(found));
  if (full) parts.push(button("Save for Perfetto", save));
  return h("div.timeline", {}, parts);

  async function save() {
    download(`${id}.json`, JSON.stringify(await json(`${path}?format=perfetto`)));
  }
}

function waterfall({ wall_ms: wall, phases, spans }) {
  const first = (phase) => spans.findIndex((part) => part.phase === phase);
  const small = phases.filter(({ ms, share }) => ms > 0 && share < 0.001);
  const rows = phases.filter(({ share }) => share >= 0.001)
    .sort((a, b) => first(a.phase) - first(b.phase));
  const rest = small.map(({ phase, ms }) => `${phaseName(phase)} ${span(ms)}`).join(", ");
  return [h("ol", {}, rows.map(({ phase, ms, share, meaning }) => {
    const kind = COMPUTES.includes(phase) ? "computes" : phase in OWN ? "works" : "waits";
    const own = spans.filter((part) => part.phase === phase);
    const isLong = share >= (kind === "waits" ? LONG_WAIT : LONG_WORK);
    return bar(kind, phaseName(phase), own.map((part) => [part.begin_ms, part.end_ms]), wall, ms,
      meaning, kind === "waits" && isLong && h("span.hint", {}, meaning), isLong && remedy(phase));
  })), rest && h("p.hint", {}, `Too short to draw: ${rest}.`)];
}

/** A row of a waterfall, with parts from and to times of `whole`. */
export const bar = (kind, name, parts, whole, ms, title, ...notes) => h(`li.${kind}`, { title },
  h("span", {}, name), h("span.track", { "aria-hidden": "true" }, parts.map(([from, to]) =>
    h("i", { "--from": from / whole, "--share": (to - from) / whole }))),
  h("span.figure", {}, span(ms)), notes);

function prefix({ num_blocks: all, num_matched: matched, num_external: lower, block_size: size,
  num_uncovered: beyond, text }) {
  const where = lower ? `, ${lower} of them in host memory or files` : "";
  const more = beyond ? `, and ${beyond} more beyond the last checkpoint of the states` : "";
  return h("p.hint", {}, `Prefix cache: ${matched} of ${counted(all, "block")} of ${size} tokens `
    + `were there${where}${more}: ${text}`);
}

function neighbours({ neighbours: others, behind }) {
  const links = behind.flatMap((id, i) => [i ? ", " : "", requestLink(id)]);
  const queue = links.length ? [h("p", {}, "In the queue it waited behind ", links)] : [];
  if (!others.length) return queue;
  return [...queue, h("h3", {}, "Neighbours, whose prompts were computed in its steps"),
    table("Neighbours", ["Request", "Prompt", "Time"], others.map((other) => [
      other.id ? requestLink(other.id) : "of another API key or server",
      counted(other.num_prompt_tokens, "token"), span(other.ms)]))];
}

function steps({ steps: all, num_steps: number }) {
  const took = (step) => step.end_ms - step.begin_ms;
  const longest = [...all].sort((a, b) => took(b) - took(a)).slice(0, 8);
  if (!longest.length) return [];
  return [h("h3", {}, `The longest of its ${counted(number, "step")}`),
    table("Longest steps", ["Step", "After", "Took", "Forward", "Tokens", "of prompts", "Requests",
      "Waiting"], longest.map((step) => [count(step.step), span(step.begin_ms), span(took(step)),
      (step.rank_forward_ms ?? [step.forward_ms]).map(span).join(", "), step.num_tokens,
      step.num_prompt_tokens, step.num_requests,
      step.waits_for ? `${step.num_waiting}, for ${step.waits_for}` : short(step.num_waiting)]))];
}

/** A link to the breakdown of a request. */
export function requestLink(id) {
  const name = h("code", {}, id.length > 20 ? `${id.slice(0, 18)}…` : id);
  return h("a", { href: `#/requests/${encodeURIComponent(id)}`, title: id }, name);
}

/** How it ended, with the status of an answer that was none. */
export function outcomeOf({ outcome, http_status: status }) {
  if (!outcome) return "running";
  return status >= 400 ? `${outcome} (${status})` : outcome;
}
