// Tokens per second over the last two minutes, which the server counts also without the page.
import { clock, facts, short, span } from "../dom.js";
import { graph, line, scaleOf } from "../graph.js";

export const title = "Throughput";
export const order = 1;

const ITL = "vllm:inter_token_latency_seconds";
const SECONDS = 5; // the numbers are means of these, because a chunk of a prompt may take long

export default function panel() {
  const names = ["Tokens/s", "Prompt tokens/s"];
  const graphs = names.map((name) => graph(name, (rate) => `${short(rate)}/s`));
  let last = null;
  return ({ metrics, rates }) => {
    const now = { gaps: metrics.sum(`${ITL}_count`), seconds: metrics.sum(`${ITL}_sum`) };
    const before = last ?? now;
    last = now;
    const gap = (now.seconds - before.seconds) / (now.gaps - before.gaps);
    const means = rates.map((values) =>
      values.slice(-SECONDS).reduce((sum, value) => sum + value, 0) / SECONDS);
    return [facts({ [names[0]]: short(means[0]), [names[1]]: short(means[1]),
      "Between tokens": span(gap * 1000) }, "big"),
    ...rates.map((values, i) => {
      const top = scaleOf(Math.max(...values));
      return graphs[i](line(values, top), values.length, top, ["2 min ago", "1 min ago", "now"],
        (at) => `${clock(Date.now() - (values.length - at) * 1000)}: ${short(values[at])} `
          + names[i].toLowerCase());
    })];
  };
}
