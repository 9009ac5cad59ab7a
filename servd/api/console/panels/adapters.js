// Which adapters run, and which wait for a place.
import { facts, h } from "../dom.js";

export const title = "Adapters";
export const order = 8;

const names = (text) => text.split(",").filter(Boolean);

export default () => ({ metrics }) => {
  const engines = metrics.all("vllm:lora_requests_info");
  if (!engines.length) return null;
  const each = (label) => [...new Set(engines.flatMap(({ labels }) => names(labels[label])))];
  const running = each("running_lora_adapters"), waiting = each("waiting_lora_adapters");
  return [
    facts({ Running: running.join(", ") || "none", Waiting: waiting.join(", ") || "none",
      "At once": engines[0].labels.max_lora }),
    h("p.hint", {}, "A request names its adapter as its model. Requests of more adapters than "
      + "run at once wait until others have ended.")];
};
