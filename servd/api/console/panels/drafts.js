// What became of the tokens that were drafted ahead of the model.
import { counted, facts, h, percent, short } from "../dom.js";

export const title = "Drafts";
export const order = 6;

const NAME = "vllm:spec_decode_num_";

export default function panel(place) {
  return ({ metrics }) => {
    const total = (name) => metrics.sum(`${NAME}${name}_total`);
    const drafted = total("draft_tokens"), kept = total("accepted_tokens"), tries = total("drafts");
    if (!tries) return place.replaceChildren(h("p.hint", {}, "No token has been drafted yet."));
    const positions = new Map();
    for (const { labels, value } of metrics.all(`${NAME}accepted_tokens_per_pos_total`)) {
      const position = Number(labels.position);
      positions.set(position, (positions.get(position) ?? 0) + value);
    }
    place.replaceChildren(
      facts({ "Tokens per step": short(1 + kept / tries), "Drafts per step": short(drafted / tries),
        Kept: percent(kept / drafted) }, "big"),
      h("div.steps", { role: "img", "aria-label": "Share of drafts kept, by position" },
        [...positions].sort(([a], [b]) => a - b).map(([position, value]) => h("div",
          { title: `Draft ${position + 1}: ${percent(value / tries)} kept` },
          h("i.decode", { "--share": value / tries })))),
      h("p.hint", {}, `Of ${counted(tries, "step")} of a request that verified drafts, since the `
        + "start. A bar: how often the first draft was kept, the second, and so on."));
  };
}
