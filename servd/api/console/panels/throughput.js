// Tokens per second over the last two minutes.
import { facts, short, span, svg } from "../dom.js";

export const title = "Throughput";
export const order = 1;

const KEPT = 120; // samples
const GENERATED = "vllm:generation_tokens_total";
const PROMPT = "vllm:prompt_tokens_total";
const ITL = "vllm:inter_token_latency_seconds";

export default function panel() {
  const rates = [];
  let last = null;
  return ({ metrics, past, seconds }) => {
    if (!last) rates.push(...ratesBefore(past));
    const now = { seconds, generated: metrics.sum(GENERATED), prompt: metrics.sum(PROMPT),
      gaps: metrics.sum(`${ITL}_count`), gapSeconds: metrics.sum(`${ITL}_sum`) };
    const before = last ?? now;
    last = now;
    const per = (name) => (now[name] - before[name]) / (seconds - before.seconds || 1);
    rates.push(per("generated"));
    if (rates.length > KEPT) rates.shift();
    const gap = (now.gapSeconds - before.gapSeconds) / (now.gaps - before.gaps);
    return [facts({
      "Tokens/s": short(rates.at(-1)),
      "Prompt tokens/s": short(per("prompt")),
      "Between tokens": span(gap * 1000),
    }, "big"), chart(rates)];
  };
}

/** Tokens per second before the page was opened, as far as the latest steps reach back. */
function ratesBefore({ data, now_ms: now }) {
  const found = [];
  for (const step of data) {
    const second = Math.floor((now - step.end_ms) / 1000);
    const drafted = step.num_drafts - step.num_accepted;
    const tokens = step.num_tokens - step.num_prompt_tokens - drafted;
    if (second >= 0 && second < KEPT - 1) found[second] = (found[second] ?? 0) + tokens;
  }
  return Array.from(found, (tokens) => tokens ?? 0).reverse();
}

function chart(rates) {
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, i) => `${KEPT - rates.length + i},${40 - (rate / most) * 38}`);
  return svg("svg", { viewBox: `0 0 ${KEPT - 1} 41`, preserveAspectRatio: "none", class: "chart",
    role: "img", "aria-label": `Generated tokens per second, at most ${short(most)}` },
    svg("polyline", { points: points.join(" "), "vector-effect": "non-scaling-stroke" }));
}
