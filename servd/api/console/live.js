// What the server does now: each panel is a file in panels/, and draws what a poll found.
import { chosenModel, health, json, send } from "./api.js";
import { h } from "./dom.js";

const REFRESH = 1000; // milliseconds
const SHOWN_STEPS = 120;

/** Panels export `title`, `order`, and by default a function that returns one which makes elements
 * of what `take` found; where it makes none, the panel is hidden. */
export default function live(root) {
  const problem = h("p.problem", { role: "alert", hidden: true });
  const grid = h("div.panels");
  root.append(problem, grid);
  const links = [...document.querySelectorAll('link[href^="console/panels/"]')];
  const panels = Promise.all(links.map((link) => import(link.href))).then((modules) =>
    modules.sort((a, b) => a.order - b.order).map((panel) => {
      const place = h("div"), draw = panel.default();
      const section = h("section.panel", { "aria-label": panel.title }, h("h2", {}, panel.title),
        place);
      grid.append(section);
      return async (sample) => {
        const parts = await draw(sample);
        section.hidden = !parts;
        show(place, [parts ?? []].flat());
      };
    }));
  let timer = null;

  async function poll() {
    clearTimeout(timer);
    try {
      if (!document.hidden) {
        const sample = await take();
        await Promise.all((await panels).map((draw) => draw(sample)));
      }
      problem.hidden = true;
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
    timer = setTimeout(poll, REFRESH);
  }

  return { show: poll, hide: () => clearTimeout(timer) };
}

/** Replace what is shown, but leave what stays in its place, for it may have the focus. */
function show(place, parts) {
  parts.forEach((part, i) => {
    const old = place.childNodes[i];
    if (!old) place.append(part);
    else if (old !== part) old.replaceWith(part);
  });
  while (place.childNodes.length > parts.length) place.lastChild.remove();
}

async function take() {
  const [text, steps, requests, state] = await Promise.all([
    send("metrics", { accept: "text/plain" }).then((response) => response.text()),
    json(`v1/steps?recent=${SHOWN_STEPS}`),
    json("v1/requests?recent=50"), health()]);
  const running = requests.data.filter((request) => request.status === "running")
    .sort((a, b) => b.wall_ms - a.wall_ms);
  const ended = requests.data.filter((request) => request.status !== "running");
  return { metrics: new Metrics(text), steps: steps.data, now: steps.now_ms, health: state, ended,
    requests: running, rates: [steps.tokens_per_second, steps.prompt_tokens_per_second] };
}

/** The lines of Prometheus' text: name{labels} value. */
class Metrics {
  constructor(text) {
    this.samples = [...text.matchAll(/^([\w:]+)(?:\{(.*)\})? (\S+)$/gm)].map(
      ([, name, labels, value]) => ({ name, value: Number(value), labels: Object.fromEntries(
        [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, k, v]) => [k, v])) }));
  }

  /** Of several models, those of the one that was chosen. */
  all(name) {
    const own = chosenModel();
    return this.samples.filter((sample) => sample.name === name
      && (!own || (sample.labels.model_name ?? own) === own));
  }

  /** The sum over all engines and processes. */
  sum(name) {
    return this.all(name).reduce((sum, sample) => sum + sample.value, 0);
  }
}
