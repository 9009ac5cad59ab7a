// What helps against each cause of slowness.
import { h } from "./dom.js";

const GUIDE = "docs/how-to";
// Phase -> what to do, and the page that says more. A flag is a link to its value on this server.
const REMEDIES = {
  picture_fetch: ["Send the pictures as data: addresses.", "pictures.md"],
  picture_process: ["Send smaller pictures, or the same again: raise --mm-processor-cache-gb.",
    "pictures.md"],
  picture_queue: ["Raise --api-server-count.", "pictures.md"],
  picture_encode: ["Send smaller pictures, or the same again: raise --encoder-cache-memory.",
    "pictures.md"],
  prefill: ["Let prompts begin alike, so that more of them is cached.", "kv-cache.md"],
  decode: ["Draft tokens ahead, or quantize the model.", "speculative-decoding.md"],
  grammar_check: ["Send the same schemas again: they are remembered.", "structured-outputs.md"],
  grammar_compile: ["Send the same schemas again: they are remembered.", "structured-outputs.md"],
  event_loop: ["Raise --api-server-count.", "several-gpus.md"],
  ipc: ["Raise --api-server-count, or look for other programs on the machine.",
    "find-slow-requests.md"],
  model_load: ["Raise --models-max, so that more models stay loaded.", "several-models.md"],
  adapter_load: ["Raise --max-cpu-loras, so that more adapters stay in memory.", "lora.md"],
  wake_up: ["Raise --sleep-idle-seconds, so that the model stays awake.", "several-models.md"],
  queue_step: ["Lower --max-num-batched-tokens: steps get shorter.", "find-slow-requests.md"],
  queue_slots: ["Raise --max-num-seqs, or add engines with --data-parallel-size.",
    "choose-a-size.md"],
  queue_blocks: ["Raise --kv-cache-memory, or lower --max-num-seqs.", "choose-a-size.md"],
  preemption: ["Raise --kv-cache-memory, or lower --max-num-seqs.", "choose-a-size.md"],
  swapped: ["Raise --kv-cache-memory, or lower --max-num-seqs.", "choose-a-size.md"],
  queue_budget: ["Raise --max-num-batched-tokens.", "find-slow-requests.md"],
  queue_adapters: ["Raise --max-loras.", "lora.md"],
  neighbour_prefill: ["Lower --max-num-batched-tokens, or compute prompts on other engines.",
    "disaggregated.md"],
  tier_read: ["Put --kv-cache-dir on a faster disk.", "kv-cache.md"],
  engine_loop: ["Look for other programs on the machine, or run fewer requests: --max-num-seqs.",
    "find-slow-requests.md"],
  rejected_drafts: ["Choose another method of drafting in --speculative-config.",
    "speculative-decoding.md"],
  stalled_worker: ["Look for other programs on the machine.", "troubleshooting.md"],
  start_up: ["Send a request after each start.", "find-slow-requests.md"],
  engine_restart: ["Read the log: it says why the engine ended.", "troubleshooting.md"],
  slow_reader: ["Look at the client and its network: the answer was there.", "monitoring.md"],
  unaccounted: ["Save the trace and look at the steps.", "trace-a-request.md"],
};

/** A sentence with links; null for a phase that is as short as it can be. */
export function remedy(phase) {
  if (!(phase in REMEDIES)) return null;
  const [text, page] = REMEDIES[phase];
  const parts = text.split(/(--[a-z-]+)/).map((part) => (part.startsWith("--")
    ? h("a", { href: `#/server/${part}` }, part) : part));
  return h("span.remedy", {}, parts, " ", h("code", {}, `${GUIDE}/${page}`));
}
