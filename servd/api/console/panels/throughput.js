// Tokens per second over the last two minutes, which the server counts also without the page.
import { facts, short, span, svg } from "../dom.js";

export const title = "Throughput";
export const order = 1;

const GENERATED = "vllm:generation_tokens_total";
const PROMPT = "vllm:prompt_tokens_total";
const ITL = "vllm:inter_token_latency_seconds";

export default function panel() {
  let last = null;
  return ({ metrics, rates, seconds }) => {
    const now = { seconds, generated: metrics.sum(GENERATED), prompt: metrics.sum(PROMPT),
      gaps: metrics.sum(`${ITL}_count`), gapSeconds: metrics.sum(`${ITL}_sum`) };
    const before = last ?? now;
    last = now;
    const per = (name) => (now[name] - before[name]) / (seconds - before.seconds || 1);
    const gap = (now.gapSeconds - before.gapSeconds) / (now.gaps - before.gaps);
    return [facts({
      "Tokens/s": short(per("generated")),
      "Prompt tokens/s": short(per("prompt")),
      "Between tokens": span(gap * 1000),
    }, "big"), chart(rates)];
  };
}

function chart(rates) {
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, i) => `${i},${40 - (rate / most) * 38}`);
  const label = `Generated tokens per second, at most ${short(most)}`;
  return svg("svg", { viewBox: `0 0 ${rates.length - 1} 41`, preserveAspectRatio: "none",
    class: "chart", role: "img", "aria-label": label },
    svg("polyline", { points: points.join(" "), "vector-effect": "non-scaling-stroke" }));
}
