// The frame: which view is shown, and how the server is.
import { choose, chosenModel, health, json } from "./api.js";
import { h } from "./dom.js";

const VIEWS = { playground: "Playground", live: "Live", requests: "Requests", server: "Server" };
const main = document.getElementById("main");
const status = document.getElementById("status");
const picker = document.getElementById("model");
const shown = {}; // view name -> { root, view }
let current = "";

/** Show the view that the address names: #/requests/ID. */
async function route() {
  const [, name, ...rest] = location.hash.split("/");
  const wanted = name in VIEWS ? name : "playground";
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.hash === `#/${wanted}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[wanted]} · servd`;
  if (current && current !== wanted) shown[current]?.view.hide?.();
  current = wanted;
  if (!shown[wanted]) {
    const root = h(`section.view.${wanted}`, { "aria-label": VIEWS[wanted] });
    main.append(root);
    const { default: view } = await import(`./${wanted}.js`);
    shown[wanted] = { root, view: view(root) };
  }
  for (const [view, { root }] of Object.entries(shown)) root.hidden = view !== current;
  shown[current]?.view.show?.(decodeURIComponent(rest.join("/")));
}

/** Let one of several models be chosen (--models-dir); an awake one at first. */
async function listModels() {
  const { data } = await json("v1/models");
  const models = data.filter((model) => model.state);
  if (!models.length || document.activeElement === picker) return;
  if (!chosenModel()) choose((models.find(({ state }) => state === "awake") ?? models[0]).id);
  picker.replaceChildren(...models.map(({ id, state }) =>
    h("option", { value: id, selected: id === chosenModel() }, `${id} (${state})`)));
  picker.hidden = false;
}

/** Show all views anew, for another model. */
picker.addEventListener("change", () => {
  choose(picker.value);
  picker.blur();
  for (const [name, { root, view }] of Object.entries(shown)) {
    view.hide?.();
    root.remove();
    delete shown[name];
  }
  history.replaceState(null, "", `#/${current}`); // what was open is of the other model
  current = "";
  route();
});

/** Say whether the server is ready: often while it loads, seldom afterwards. */
async function watch() {
  let pause = 5000;
  try {
    const { status: state, phase, progress, reason } = await health();
    const share = progress ? ` ${Math.round(progress * 100)} %` : "";
    const text = { ready: "Ready", loading: `Loading: ${phase}${share}` }[state];
    status.textContent = text ?? reason ?? state;
    status.dataset.state = state;
    if (state === "loading") pause = 500;
    if (chosenModel()) await listModels();
  } catch (error) {
    status.textContent = error.message;
    status.dataset.state = "dead";
  }
  setTimeout(watch, pause);
}

window.addEventListener("hashchange", route);
listModels().catch(() => {}).then(route).then(watch);
