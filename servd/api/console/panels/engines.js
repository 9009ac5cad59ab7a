// The processes: engine, workers, this API server.
import { json } from "../api.js";
import { facts, span } from "../dom.js";

export const title = "Engine and workers";
export const order = 5;

export default function panel() {
  let info = null;
  return async ({ metrics, health, steps }) => {
    info = info?.engine ? info : await json("server_info");
    const lag = "servd:event_loop_lag_seconds";
    const option = (flag) => info.options.find((option) => option.flag === flag)?.value;
    const last = steps.at(-1);
    const sleeping = metrics.all("vllm:engine_sleep_state")
      .some(({ labels, value }) => labels.sleep_state === "discard_all" && value);
    return facts({
      Engine: [health.status, sleeping ? "asleep" : health.activity].filter(Boolean).join(", "),
      Engines: health.engines?.join(", "),
      "Last step": health.seconds_since_step == null ? null
        : `${span(health.seconds_since_step * 1000)} ago`,
      "Last step took": last && span(last.end_ms - last.begin_ms),
      Workers: info.engine && `${option("--tensor-parallel-size")} × ${info.engine.device}, `
        + option("--executor"),
      "API servers": option("--api-server-count"),
      "Their lag": span((metrics.sum(`${lag}_sum`) / metrics.sum(`${lag}_count`)) * 1000),
    });
  };
}
