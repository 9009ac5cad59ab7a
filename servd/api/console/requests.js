// Recent and slow requests, and where the time of each went.
import { json } from "./api.js";
import { clock, counted, h, percent, problem, span, table } from "./dom.js";
import { phaseName, outcomeOf, requestLink, timeline } from "./timeline.js";

const REFRESH = 2000; // milliseconds
const HEADS = ["When", "Request", "Owner", "Outcome", "Took", "First token", "Prompt", "Answer",
  "Waited most for"];
const TEXT_HINT = "id, route, model, owner or outcome";

export default function requests(root) {
  let timer = null;
  let found = [];
  const order = h("select", { change: refresh }, h("option", { value: "recent" }, "Most recent"),
    h("option", { value: "slowest" }, "Slowest"));
  const wait = h("select", { change: draw }, h("option", { value: "" }, "Anything"));
  const text = h("input", { type: "search", placeholder: TEXT_HINT, input: draw });
  const filters = h("form.filters", { submit: (event) => event.preventDefault() },
    h("label", {}, "Show", order), h("label", {}, "That waited for", wait),
    h("label", {}, "Containing", text));
  const place = h("div");
  const list = h("div.page", {}, h("h2", {}, "Requests"), filters, place);
  const one = h("div.page", { hidden: true });
  root.append(list, one);

  async function refresh() {
    clearTimeout(timer);
    try {
      found = (await json(`v1/requests?${order.value}=100`)).data;
      draw();
    } catch (error) {
      place.replaceChildren(problem(error));
    }
    timer = setTimeout(refresh, REFRESH);
  }

  function draw() {
    const waits = [...new Set(found.map((each) => each.longest_wait).filter(Boolean))].sort();
    if (waits.join() !== [...wait.options].slice(1).map((option) => option.value).join()) {
      const chosen = wait.value;
      wait.replaceChildren(wait.options[0],
        ...waits.map((name) => h("option", { value: name }, phaseName(name))));
      wait.value = waits.includes(chosen) ? chosen : "";
    }
    const several = found.some((request) => request.engine); // there is more than number 0
    const wanted = found.filter((request) => (!wait.value || request.longest_wait === wait.value)
      && textOf(request).includes(text.value.trim()));
    const focused = document.activeElement?.getAttribute("href"); // keep the place of the keyboard
    const scrolled = place.firstElementChild?.scrollLeft ?? 0;
    place.replaceChildren(wanted.length ? table("List of requests", HEADS,
      wanted.map((request) => row(request, several)))
      : h("p.hint", {}, found.length ? "None of them fits." : "No request has come yet: send one "
        + "from the playground."));
    place.firstElementChild.scrollLeft = scrolled;
    if (focused) place.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  }

  async function open(id) {
    one.replaceChildren(h("p", {}, h("a", { href: "#/requests" }, "← All requests")),
      h("h2", {}, h("code", {}, id)));
    try {
      one.append(await timeline(id, true));
    } catch (error) {
      one.append(problem(error));
    }
  }

  return {
    show(id) {
      clearTimeout(timer);
      list.hidden = id !== "";
      one.hidden = id === "";
      return id ? open(id) : refresh();
    },
    hide: () => clearTimeout(timer),
  };
}

function textOf(request) {
  return `${request.id} ${request.route} ${request.model} ${request.owner} ${outcomeOf(request)}`;
}

function row(request, several) {
  const engine = several ? `, engine ${request.engine}` : "";
  const origin = `${request.route}, ${request.model}${engine}`;
  const { num_prompt_tokens: prompt, num_cached_tokens: cached } = request;
  const { longest_wait: wait, longest_wait_ms: ms } = request;
  const waited = wait && `${phaseName(wait)}: ${span(ms)}, ${percent(ms / request.wall_ms)}`;
  return [
    clock(request.created * 1000),
    h("div", {}, requestLink(request.id), h("div.hint", {}, origin)),
    request.owner || "–",
    outcomeOf(request),
    span(request.wall_ms),
    span(request.ttft_ms),
    counted(prompt, "token") + (cached ? `, ${cached} cached` : ""),
    counted(request.num_output_tokens, "token"),
    waited ?? "–",
  ];
}
