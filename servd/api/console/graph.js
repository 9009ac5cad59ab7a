// A graph with scales. It tells the value at the pointer or, with the arrow keys, at the mark.
import { h, short, svg } from "./dom.js";

/** The end of a scale: at least `most`, and a round number like its half. */
export function scaleOf(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 2)));
  return power * [1, 2, 4, 10].find((factor) => factor * power >= Math.max(most, 2));
}

/** A line through values from 0 to `top`. */
export const line = (values, top) => svg("svg", { viewBox: `0 0 ${values.length} 1`,
  preserveAspectRatio: "none" }, svg("polyline", { "vector-effect": "non-scaling-stroke",
  points: values.map((value, i) => `${i + 0.5},${1 - value / top}`).join(" ") }));

/** Bars beside each other, each with the heights of its parts, by class. */
export const bars = (all) => h("div.bars", {}, all.map((parts) => h("div", {},
  Object.entries(parts).map(([name, share]) => h(`i.${name}`, { "--share": share })))));

/** The graph stays on the page, for pointer and focus; `draw` has its content replaced. `write`
 * makes the text of a number of the vertical scale. */
export function graph(label, write = short) {
  const drawing = h("div.drawing"), vertical = h("div.vertical"), horizontal = h("div.horizontal");
  const mark = h("div.mark", { hidden: true }, h("i"), h("span"));
  // Keys, touch and screen readers have what an input offers them.
  const input = h("input", { type: "range", min: 0, "aria-label": label, pointermove: (event) => {
    const { left, width } = input.getBoundingClientRect();
    input.value = Math.floor(((event.clientX - left) / width) * (Number(input.max) + 1));
    show();
  }, pointerleave: leave, input: show, focus: show, blur: leave });
  const root = h("figure.graph", {}, h("figcaption", {}, label), vertical,
    h("div.plot", {}, drawing, input, mark), horizontal);
  let tell = () => "";

  function show() {
    const text = tell(Number(input.value));
    input.setAttribute("aria-valuetext", text);
    mark.lastChild.textContent = text;
    mark.style.setProperty("--at", (Number(input.value) + 0.5) / (Number(input.max) + 1));
    mark.hidden = false;
  }

  function leave() {
    mark.hidden = document.activeElement !== input && !input.matches(":hover");
  }

  /** `number` points from 0 to `top`; `ends` are texts along them, `describe` has that of one. */
  function draw(content, number, top, ends, describe) {
    tell = describe;
    input.max = number - 1;
    if (mark.hidden) input.value = number - 1;
    else show();
    drawing.replaceChildren(content);
    vertical.replaceChildren(...[top, top / 2, 0].map((value) => h("span", {}, write(value))));
    horizontal.replaceChildren(...ends.map((text) => h("span", {}, text)));
    return root;
  }

  return draw;
}
