// What became of the tokens that were drafted ahead of the model.
import { counted, facts, h, percent, short } from "../dom.js";
import { bars, graph } from "../graph.js";

export const title = "Drafts";
export const order = 6;

const NAME = "vllm:spec_decode_num_";

export default function panel() {
  const draw = graph("Share of drafts kept, by position", (share) => `${share * 100} %`);
  return ({ metrics }) => drawn(metrics, draw);
}

function drawn(metrics, draw) {
  const total = (name) => metrics.sum(`${NAME}${name}_total`);
  const drafted = total("draft_tokens"), kept = total("accepted_tokens"), tries = total("drafts");
  if (!tries) return h("p.hint", {}, "No token has been drafted yet.");
  const shares = []; // by position
  for (const { labels, value } of metrics.all(`${NAME}accepted_tokens_per_pos_total`)) {
    shares[labels.position] = (shares[labels.position] ?? 0) + value / tries;
  }
  return [
    facts({ "Tokens per step": short(1 + kept / tries), "Drafts per step": short(drafted / tries),
      Kept: percent(kept / drafted) }, "big"),
    draw(bars(shares.map((share) => ({ decode: share }))), shares.length, 1, ["draft 1",
      `draft ${shares.length}`], (i) => `draft ${i + 1}: ${percent(shares[i])} kept`),
    h("p.hint", {}, `Of ${counted(tries, "step")} of a request that verified drafts, since the `
      + "start. A bar: how often the first draft was kept, the second, and so on.")];
}
