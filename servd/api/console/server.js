// How the server is set up, and why.
import { health, json } from "./api.js";
import { count, counted, facts, gib, h, problem, span, table } from "./dom.js";
import { bar } from "./timeline.js";

const SOURCES = { decided: "Decided by servd", given: "Given at the start", default: "Default" };

export default function server(root) {
  return {
    /** `flag` is the option to point at. */
    async show(flag) {
      try {
        const [info, state] = await Promise.all([json("server_info"), health()]);
        root.replaceChildren(h("div.page", {}, ...parts(info, state)));
        if (flag) pointAt(flag);
      } catch (error) {
        root.replaceChildren(problem(error));
      }
    },
  };
}

function pointAt(flag) {
  const place = document.getElementById(flag);
  if (!place) return;
  place.closest("details").open = true;
  place.focus();
  place.scrollIntoView({ block: "center" });
}

function parts(info, health) {
  const decided = info.options.filter((option) => option.source === "decided");
  const sections = [...new Set(info.options.map((option) => option.section))].map((section) => {
    const options = info.options.filter((option) => option.section === section);
    const changed = options.filter((option) => option.source !== "default").length;
    return h("details", {}, h("summary", {}, section,
      h("span.hint", {}, ` ${options.length} options, ${changed} not at their default`)),
    optionTable(section, options, true));
  });
  return [
    h("h2", {}, info.model[0]),
    facts({
      Health: describe(health),
      "Up for": span(info.uptime_seconds * 1000),
      Model: info.architecture,
      ...engineFacts(info.engine),
    }),
    h("h2", {}, "Start-up"),
    startup(info.startup_seconds),
    h("h2", {}, "What servd decided"),
    h("p.hint", {}, "Options that nobody gave, and why they have their value. To choose otherwise, "
      + "start the server with the flag."),
    optionTable("What servd decided", decided),
    h("h2", {}, "All options"),
    ...sections,
    h("h2", {}, "Versions"),
    facts({ servd: info.version, ...info.versions }),
  ];
}

function describe(health) {
  const activity = health.activity ? `, ${health.activity}` : "";
  const reason = health.reason ?? (health.phase ? `${health.phase}` : "");
  return `${health.status}${activity}${reason && `: ${reason}`}`;
}

function engineFacts(engine) {
  if (!engine) return { Engine: "still loading" };
  const checkpoints = engine.num_checkpoints;
  const tokens = engine.num_blocks * engine.block_size;
  return {
    Device: `${engine.device}, ${engine.dtype}`,
    Attention: engine.attention_backend,
    Weights: gib(engine.weights_bytes),
    "KV cache": `${gib(engine.num_blocks * engine.kv_bytes_per_block)}: ${count(tokens)} tokens in `
      + `${count(engine.num_blocks)} blocks of ${engine.block_size}`,
    ...checkpoints && { States: `room for ${counted(checkpoints, "checkpoint")}` },
    "Longest context": `${count(engine.max_model_len)} tokens`,
  };
}

function startup(seconds) {
  const phases = Object.entries(seconds);
  const whole = phases.reduce((sum, [, spent]) => sum + spent, 0);
  let before = 0;
  const rows = phases.map(([phase, spent]) => {
    before += spent;
    return bar("computes", phase, [[before - spent, before]], whole, spent * 1000);
  });
  if (!rows.length) return h("p.hint", {}, "The model is still loading.");
  return h("div.timeline", {},
    h("p.hint", {}, `${span(whole * 1000)} from the command until requests were served.`),
    h("ol", {}, rows));
}

function written(value) {
  if (value === null) return "–";
  if (Array.isArray(value)) return value.join(", ") || "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

const optionTable = (label, options, isTarget = false) => table(label, ["Option", "Value", "Why"],
  options.map(({ flag, value, source, why, about }) => [
    h("code", { title: about, id: isTarget && flag, tabindex: isTarget && -1 }, flag),
    h("code", {}, written(value)),
    why ?? h("span", {}, `${SOURCES[source]}. `, h("span.hint", {}, about))]));
