// The blocks of the KV cache, by the request that owns them.
import { count, counted, gib, h, percent } from "../dom.js";

export const title = "KV cache";
export const order = 3;

const CELLS = 400; // at most: a cell is one block, or several
const SHADES = 5; // of owners beside each other

export default () => ({ metrics, requests }) => {
  const configs = metrics.all("vllm:cache_config_info"), [config] = configs;
  if (!config) return h("p.hint", {}, "The model is loading.");
  const size = Number(config.labels.block_size);
  const blocks = configs.reduce((sum, { labels }) => sum + Number(labels.num_gpu_blocks), 0);
  const usage = metrics.sum("vllm:kv_cache_usage_perc") / configs.length; // of all engines
  const used = Math.round(usage * blocks);
  const owners = shares(requests, size, used);
  const perCell = Math.ceil(blocks / CELLS);
  const cells = owners.flatMap(({ id, num }, i) => Array.from(
    { length: Math.max(1, Math.round(num / perCell)) },
    () => h("i", { class: `owner${i % SHADES}`, title: `${id}: ${counted(num, "block")}` })));
  const free = Math.max(0, Math.ceil(blocks / perCell) - cells.length);
  const stateBytes = metrics.sum("servd:state_cache_max_bytes");
  const label = `${percent(used / blocks)} of the blocks in use by `
    + counted(owners.length, "request");
  return [
    h("p", {}, `${count(used)} of ${counted(blocks, "block")} in use, `
      + `${percent(used / blocks)}. There is room for ${counted(blocks * size, "token")}.`),
    h("div.map", { role: "img", "aria-label": label }, cells,
      Array.from({ length: free }, () => h("i"))),
    stateBytes ? h("p", {}, "States of earlier prompts: "
      + `${counted(metrics.sum("servd:state_cache_checkpoints"), "checkpoint")}, `
      + `${gib(metrics.sum("servd:state_cache_bytes"))} of ${gib(stateBytes)}.`) : null,
    h("p.hint", {}, `A cell is ${counted(perCell, "block")} of ${counted(size, "token")}; each `
      + "colour is a request, by its number of tokens. Free blocks keep earlier prompts until "
      + "they are needed.")];
};

/** Who has how many blocks: those with tokens come before those that may still wait; a block that
 * requests share counts for the first of them. */
function shares(requests, size, used) {
  let left = used;
  const computing = requests.filter((request) => request.num_output_tokens);
  const owners = [...new Set([...computing, ...requests])].map((request) => {
    const tokens = request.num_prompt_tokens + request.num_output_tokens;
    const num = Math.min(left, Math.ceil(tokens / size));
    left -= num;
    return { id: request.id, num };
  });
  if (left) owners.push({ id: "others", num: left }); // of other keys or API processes
  return owners.filter(({ num }) => num > 0);
}
