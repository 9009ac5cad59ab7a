// The tokens of an answer, each with its probability, and beside it what else it could have been.
import { h, percent, visible } from "./dom.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 };
const SHOWN = new WeakMap(); // element of a token -> its entry in `logprobs`
const card = h("div.alternatives", { id: "alternatives", role: "tooltip", hidden: true });
document.body.append(card);

/** The tokens of one text, which are drawn in pieces; a character may be spread over several. */
export class Tokens {
  decoder = new TextDecoder();
  ends = []; // in the text
  entries = []; // of `logprobs`; undefined without

  add(text, entries = []) {
    const parts = entries.map((entry) => entry.bytes
      ? this.decoder.decode(Uint8Array.from(entry.bytes), { stream: true }) : entry.token);
    // What was held back or cut out between tokens and text: one element for all of them.
    if (parts.join("") !== text) this.#push(text, entries.at(-1));
    else parts.forEach((part, i) => this.#push(part, entries[i]));
  }

  #push(text, entry) {
    if (!text) return;
    this.ends.push((this.ends.at(-1) ?? 0) + text.length);
    this.entries.push(entry);
  }

  /** The nodes of a piece of the text, which is there at `at`. */
  write(text, at) {
    const nodes = [];
    let low = 0;
    for (let high = this.ends.length; low < high;) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > at) high = middle;
      else low = middle + 1;
    }
    for (let from = 0; from < text.length; low++) {
      const to = (this.ends[low] ?? Infinity) - at;
      const piece = text.slice(from, to);
      nodes.push(this.entries[low] ? element(piece, this.entries[low]) : piece);
      from = to;
    }
    return nodes;
  }
}

function element(text, entry) {
  const token = h("span.token", { tabindex: -1 }, text);
  SHOWN.set(token, entry);
  token.style.setProperty("--doubt", (1 - Math.exp(entry.logprob)).toFixed(3));
  return token;
}

/** Let pointer and arrow keys show the alternatives of the tokens inside an element. */
export function explainTokens(block) {
  block.addEventListener("pointerover", (event) => show(event.target));
  block.addEventListener("pointerleave", hide);
  block.addEventListener("focusin", (event) => show(event.target));
  block.addEventListener("focusout", hide);
  block.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const tokens = [...block.querySelectorAll(".token")];
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    const here = document.activeElement;
    const next = Math.max(0, Math.min(tokens.indexOf(here) + STEPS[event.key], tokens.length - 1));
    here.tabIndex = -1; // the whole text is one stop of the tab key
    tokens[next].tabIndex = 0;
    tokens[next].focus();
  });
}

function hide() {
  card.hidden = true;
}

function show(token) {
  const entry = SHOWN.get(token);
  if (!entry) return hide();
  const others = entry.top_logprobs.filter((other) => other.token !== entry.token);
  const rows = [entry, ...others].sort((a, b) => b.logprob - a.logprob).map((other) => {
    const share = Math.exp(other.logprob);
    return h("li", { class: other === entry && "chosen", "--share": share },
      h("code", {}, visible(other.token)), h("span", {}, percent(share)));
  });
  card.replaceChildren(h("ol", {}, rows));
  card.hidden = false;
  token.setAttribute("aria-describedby", card.id);
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const left = Math.min(at.left, innerWidth - card.offsetWidth - 8);
  const below = at.bottom + 6 + card.offsetHeight < innerHeight;
  card.style.setProperty("left", `${Math.max(8, left)}px`);
  card.style.setProperty("top", `${below ? at.bottom + 6 : at.top - card.offsetHeight - 6}px`);
}
