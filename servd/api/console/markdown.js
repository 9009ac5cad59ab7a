// Markdown of an answer, as elements. What a model wrote only ever goes into text nodes, and into
// the address of a link that begins with http. While an answer comes, only its last block is drawn
// anew.
import { copyButton, fill, h } from "./dom.js";
import { fillInline } from "./inline.js";

const MAX_DEPTH = 8; // of lists and quotes in each other
const MAX_HEAD = 200; // characters that decide what a line begins; no fence or rule is longer
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: {1,4}(?! )| |$)/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}\s*$/;

/** A line is where it begins and ends in the text, without the marks of its list or quote. */
function linesOf(text) {
  const lines = [];
  let at = 0;
  for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", at)) {
    lines.push({ at, end });
    at = end + 1;
  }
  return [...lines, { at, end: text.length }];
}

const marginOf = (text) => text.length - text.trimStart().length;

function codeBlock(language) {
  const code = h("code");
  const pre = h("pre", { tabindex: 0 }, code);
  const head = h("div.head", {}, h("span", {}, language || "code"),
    copyButton(() => code.textContent, pre));
  return { node: h("div.block", {}, head, pre), code };
}

export class Markdown {
  /** `write(text, at)` makes the nodes of a piece of the source, which is there at `at`. */
  constructor(root, write = (text) => [text]) {
    Object.assign(this, { root, write });
    this.text = ""; // what is not settled: from the beginning of the last block
    this.at = 0; // where that is in the source
    this.live = []; // its nodes
    this.open = null; // a fence that has not ended: lines are added to it, nothing is drawn anew
  }

  append(text) {
    this.text += text;
  }

  /** Draw what is new; with the last line if no more will come. */
  draw(isWhole = false) {
    if (isWhole && this.text.endsWith("\n")) this.text = this.text.slice(0, -1);
    if (this.open) this.#extend(isWhole);
    if (this.open) return;
    const lines = linesOf(this.text);
    const numComplete = lines.length - (isWhole ? 0 : 1);
    for (const node of this.live) node.remove();
    const blocks = this.#blocks(lines, 0, numComplete);
    fill(this.root, blocks.map(([, node]) => node));
    if (this.open) {
      this.live = [];
      return this.#settle(lines[numComplete].at);
    }
    // A line that has not ended may become another kind of block, or make the one before a table.
    const last = Math.max(blocks.findLastIndex(([first]) => first + 1 < numComplete), 0);
    this.live = blocks.slice(last).map(([, node]) => node);
    if (blocks.length) this.#settle(lines[blocks[last][0]].at);
  }

  /** What comes before is drawn as it will stay. */
  #settle(length) {
    this.text = this.text.slice(length);
    this.at += length;
  }

  #extend(isWhole) {
    const lines = linesOf(this.text);
    const complete = isWhole ? lines : lines.slice(0, -1);
    const end = complete.findIndex((line) => this.#closes(line, this.open));
    this.#addCode(this.open, end < 0 ? complete : complete.slice(0, end));
    if (end >= 0) this.open = null;
    this.#settle(lines[end < 0 ? complete.length : end + 1]?.at ?? this.text.length);
  }

  #addCode({ code, indent }, lines) {
    for (const line of lines) {
      const at = line.at + Math.min(marginOf(this.#string(line)), indent);
      fill(code, this.write(`${this.text.slice(at, line.end)}\n`, this.at + at));
    }
  }

  #closes(line, { mark }) {
    const text = this.#string(line).trim();
    return text.startsWith(mark) && text === mark[0].repeat(text.length);
  }

  #string = ({ at, end }) => this.text.slice(at, end);

  /** The beginning of a line. If it goes on, a mark at its end says so to FENCE and RULE. */
  #head = ({ at, end }) => (end - at > MAX_HEAD ? this.text.slice(at, at + MAX_HEAD) + "`"
    : this.text.slice(at, end));

  #fill(element, lines) {
    fillInline(element, lines, this.text, (text, at) => this.write(text, this.at + at));
    return element;
  }

  /** The blocks of lines, each as the number of its first line and its node. */
  #blocks(lines, depth, numComplete = lines.length) {
    const found = [];
    let i = 0;
    while (i < lines.length) {
      const first = i;
      let node;
      if (this.#isBlank(lines[i])) i++;
      else [i, node] = this.#block(lines, i, depth, numComplete);
      if (node) found.push([first, node]);
    }
    return found;
  }

  #isBlank = (line) => !this.#string(line).trim();

  /** The block that begins at a line: the number of the line after it, and its node. */
  #block(lines, i, depth, numComplete) {
    const head = this.#head(lines[i]);
    const fence = FENCE.exec(head);
    if (fence) return this.#fence(lines, i, fence, depth === 0 ? numComplete : lines.length);
    const heading = HEADING.exec(head);
    if (heading) {
      const element = h(heading[1].length < 3 ? "h3" : "h4");
      return [i + 1, this.#fill(element, [without(lines[i], heading[0].length)])];
    }
    if (RULE.test(head)) return [i + 1, h("hr")];
    if (depth < MAX_DEPTH && QUOTE.test(head)) return this.#quote(lines, i, depth);
    if (depth < MAX_DEPTH && ITEM.test(head)) return this.#list(lines, i, depth);
    let end = i + 1;
    if (this.#isTable(lines, i)) {
      while (end < lines.length && this.#string(lines[end]).includes("|")) end++;
      return [end, this.#table(lines.slice(i, end))];
    }
    while (end < lines.length && !this.#interrupts(lines, end)) end++;
    return [end, this.#fill(h("p"), lines.slice(i, end))];
  }

  #fence(lines, i, [, { length: indent }, mark, language], numComplete) {
    const { node, code } = codeBlock(language);
    const fence = { code, mark, indent };
    let end = i + 1;
    while (end < lines.length && !this.#closes(lines[end], fence)) end++;
    const isOpen = i < numComplete && numComplete < lines.length && end >= numComplete;
    if (isOpen) this.open = fence;
    this.#addCode(fence, lines.slice(i + 1, isOpen ? numComplete : end));
    return [isOpen ? lines.length : end + 1, node];
  }

  #quote(lines, i, depth) {
    const own = [];
    for (; i < lines.length; i++) {
      const mark = QUOTE.exec(this.#head(lines[i]));
      if (!mark) break;
      own.push(without(lines[i], mark[0].length));
    }
    return [i, fill(h("blockquote"), this.#blocks(own, depth + 1).map(([, node]) => node))];
  }

  #list(lines, i, depth) {
    const [, { length: indent }, mark] = ITEM.exec(this.#head(lines[i]));
    const list = mark.length > 1 ? h("ol", { start: parseInt(mark, 10) }) : h("ul");
    while (i < lines.length) {
      const head = this.#head(lines[i]);
      const item = ITEM.exec(head);
      if (!item || item[2].at(-1) !== mark.at(-1) || RULE.test(head)) break;
      const own = [without(lines[i], item[0].length)];
      for (i++; i < lines.length; i++) {
        const margin = marginOf(this.#string(lines[i]));
        const isBlank = this.#isBlank(lines[i]);
        const isOutside = margin < indent + 2 && (this.#isBlank(lines[i - 1])
          || ITEM.test(this.#head(lines[i])) || this.#interrupts(lines, i));
        if (isOutside && !isBlank) break;
        own.push(without(lines[i], Math.min(margin, item[0].length)));
      }
      list.append(fill(h("li"), this.#blocks(own, depth + 1).map(([, node]) => node)));
    }
    return [i, list];
  }

  /** Whether a line ends the paragraph before it. */
  #interrupts(lines, i) {
    const head = this.#head(lines[i]);
    const item = ITEM.exec(head);
    return this.#isBlank(lines[i]) || this.#isTable(lines, i)
      || [FENCE, HEADING, QUOTE, RULE].some((begins) => begins.test(head))
      || (item !== null && !(parseInt(item[2], 10) > 1)); // "in\n1986. It" is no list
  }

  #isTable(lines, i) {
    if (i + 1 >= lines.length || !this.#string(lines[i]).includes("|")) return false;
    const rule = this.#string(lines[i + 1]);
    return rule.includes("-") && /^[\s|:-]+$/.test(rule)
      && this.#cells(lines[i]).length === this.#cells(lines[i + 1]).length;
  }

  #cells(line) {
    const text = this.#string(line);
    const from = text.length - text.trimStart().replace(/^\|/, "").length;
    const to = text.trimEnd().replace(/(?<!\\)\|$/, "").length;
    const bars = [...text.matchAll(/\\.|\|/g)].filter(({ index, 0: mark }) =>
      mark === "|" && index >= from && index < to).map(({ index }) => index);
    return [...bars, to].map((end, n) => (
      { at: line.at + (n ? bars[n - 1] + 1 : from), end: line.at + end }));
  }

  #table([head, , ...body]) {
    const row = (line, tag) =>
      fill(h("tr"), this.#cells(line).map((cell) => this.#fill(h(tag), [cell])));
    return h("div.scroll", { tabindex: 0, role: "group", "aria-label": "Table" },
      h("table", {}, h("thead", {}, row(head, "th")),
        fill(h("tbody"), body.map((line) => row(line, "td")))));
  }
}

const without = ({ at, end }, length) => ({ at: Math.min(at + length, end), end });
