// Blocks of the KV cache below the device: host memory and files.
import { json } from "../api.js";
import { count, counted, gib, h, percent, table } from "../dom.js";

export const title = "KV cache, lower tiers";
export const order = 7;

export default () => async ({ metrics, health }) => {
  const engines = health.status === "ready" ? (await json("v1/cache")).engines : [];
  const rows = engines.flatMap(({ rank, tiers }) => tiers.slice(1).map((tier) => [
    engines.length > 1 ? `${tier.name}, engine ${rank}` : tier.name,
    `${count(tier.blocks)} of ${count(tier.max_blocks)}`, gib(tier.bytes), count(tier.hits),
    tier.skipped ? "skipped: computing is faster" : counted(tier.damaged, "damaged file")]));
  if (!rows.length) return null;
  const total = (name) => metrics.sum(`vllm:external_prefix_cache_${name}_total`);
  return [
    table("Lower tiers", ["Tier", "Blocks", "Bytes", "Blocks used again", "State"], rows),
    h("p.hint", {}, `${percent(total("hits") / (total("queries") || 1))} of the prompt tokens `
      + "that were looked up there were there. Requests that wait with blocks there: "
      + `${count(metrics.sum("vllm:num_requests_swapped"))}.`)];
};
