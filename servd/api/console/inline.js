// Marks inside of a paragraph, a heading or a cell: emphasis, code, links.
import { fill, h } from "./dom.js";

const MAX_CHARACTERS = 20_000; // a longer paragraph is shown as it was written
const MAX_DEPTH = 8; // of marks in each other
const MARK = /\\[!-/:-@[-`{-~]|`+|\*+|_+|~+|!?\[|\]|https?:\/\/[^\s<>[\]]+/g;
const TARGET = /\]\( ?<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)?)>?(?: +["'][^"'\n]*["'])? ?\)/y;
const WORD = /[\p{L}\p{N}]/u;
const TAGS = { "*1": "em", "*2": "strong", _1: "em", _2: "strong", "~2": "del" };
const isWeb = (address) => /^https?:\/\/[^/]/i.test(address);

/** Fill an element with lines of `source`, each as where it begins and ends. `write(text, at)`
 * makes the nodes of a piece of it. */
export function fillInline(element, lines, source, write) {
  const trimmed = lines.map(({ at, end }) => {
    const text = source.slice(at, end);
    return { at: at + text.length - text.trimStart().length, text: text.trim() };
  });
  const text = trimmed.map((line) => line.text).join("\n");
  const nesting = [element];
  let at = 0;
  let line = 0;
  let lineAt = 0; // in `text`

  function put(to) {
    while (at < to) {
      const own = trimmed[line];
      const end = Math.min(to, lineAt + own.text.length + 1); // with the end of its line
      fill(nesting.at(-1), write(text.slice(at, end), own.at + at - lineAt));
      at = end;
      if (at > lineAt + own.text.length) lineAt += trimmed[line++].text.length + 1;
    }
  }

  for (const mark of text.length > MAX_CHARACTERS ? [] : marksOf(text)) {
    put(mark.from);
    if (mark.begins) {
      const parent = nesting.at(-1);
      const isTooDeep = nesting.length > MAX_DEPTH || (mark.begins === "a" && parent.closest("a"));
      const child = isTooDeep ? parent : h(mark.begins, attributes(mark));
      if (child !== parent) parent.append(child);
      nesting.push(child);
    }
    at = mark.to; // a mark never goes over the end of its line
    if (mark.ends) nesting.pop();
  }
  put(text.length);
}

const attributes = ({ address }) =>
  address ? { href: address, rel: "noopener noreferrer", target: "_blank" } : {};

/** The marks of a text, in order: what is left out of it, and what begins or ends there. */
function marksOf(text) {
  const marks = [];
  const open = []; // what may begin emphasis or a link
  const lengths = { "*": [], _: [], "~": [], "[": [] }; // of those, by character
  const unclosed = new Set(); // lengths of runs of ` that nothing ends
  const scan = new RegExp(MARK);
  for (let match = scan.exec(text); match; match = scan.exec(text)) {
    const [run] = match;
    const from = match.index;
    const to = from + run.length;
    if (run[0] === "\\") marks.push({ from, to: from + 1 });
    else if (run[0] === "`") scan.lastIndex = code(run, from, to);
    else if (run.endsWith("[")) push("[", from, to);
    else if (run === "]") scan.lastIndex = link(from, to);
    else if (run[0] === "h") scan.lastIndex = address(from, to);
    else emphasis(run, from, to);
  }
  return marks.sort((a, b) => a.from - b.from || a.to - b.to);

  function push(char, from, to) {
    open.push({ char, from, to });
    lengths[char].push(to - from);
  }

  /** The last open one of a character, which closes what was begun in it. */
  function pop(char) {
    for (;;) {
      const last = open.pop();
      lengths[last.char].pop();
      if (last.char === char) return last;
    }
  }

  function code(run, from, to) {
    let end = unclosed.has(run.length) ? -1 : text.indexOf(run, to);
    while (end >= 0) {
      let after = end + run.length;
      while (text[after] === "`") after++;
      if (after === end + run.length) {
        marks.push({ from, to, begins: "code" }, { from: end, to: after, ends: true });
        return after;
      }
      end = text.indexOf(run, after);
    }
    unclosed.add(run.length);
    return to;
  }

  function link(from, to) {
    if (!lengths["["].length) return to;
    TARGET.lastIndex = from;
    const target = TARGET.exec(text);
    const first = pop("[");
    if (!target || !isWeb(target[1])) return to;
    marks.push({ from: first.from, to: first.to, begins: "a", address: target[1] },
      { from, to: TARGET.lastIndex, ends: true });
    return TARGET.lastIndex;
  }

  function address(from, to) {
    const isOpen = text.slice(from, to).includes("("); // it may end with what closes this
    let end = to;
    while (".,;:!?'\"*_".includes(text[end - 1]) || (text[end - 1] === ")" && !isOpen)) end--;
    if (!isWeb(text.slice(from, end))) return to;
    marks.push({ from, to: from, begins: "a", address: text.slice(from, end) },
      { from: end, to: end, ends: true });
    return end;
  }

  function emphasis(run, from, to) {
    const char = run[0];
    const before = text[from - 1] ?? " ";
    const after = text[to] ?? " ";
    const isInWord = char === "_" && WORD.test(before) && WORD.test(after);
    if (isInWord || run.length > 3 || (char === "~" && run.length !== 2)) return;
    let at = from;
    while (before.trim() && at < to && lengths[char].length) {
      const length = lengths[char].at(-1);
      if (length > to - at) break;
      const first = pop(char);
      marks.push({ from: first.from, to: first.to, begins: TAGS[char + length] },
        { from: at, to: at + length, ends: true });
      at += length;
    }
    while (after.trim() && at < to) {
      const length = to - at > 1 ? 2 : 1;
      push(char, at, at + length);
      at += length;
    }
  }
}
