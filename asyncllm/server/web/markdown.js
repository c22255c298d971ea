// Markdown to DOM nodes, for text that a model wrote: nothing in it is ever read as HTML.
//
// `renderBlocks` is a pure function of whole lines. `MarkdownStream` renders text that still grows:
// blocks that have ended are left alone, a code block grows line by line, and only the block still
// open is rendered again, which is never more than OPEN_LIMIT characters (LONG_LIMIT in a table or
// in code inside a list). So the work per update is bounded, however long the answer.

import { copyButton, el } from "./dom.js";
import { renderInline } from "./inline.js";

const OPEN_LIMIT = 4096;
const LONG_LIMIT = 12288;
const CODE_NODE = 4096; // characters of one text node; appending to a longer one copies it all
const MAX_DEPTH = 8; // quotes and lists in each other

// Each of these is linear in the line: no two neighbours that could share a run of spaces.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const isBlank = (line) => /^\s*$/.test(line);

/** Nodes for whole lines. */
export function renderBlocks(lines, depth = 0) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, depth);
    if (node) nodes.push(node);
    at = next;
  }
  return nodes;
}

/** One block from line `at` on: [node or null, the line after it]. */
function block(lines, at, depth) {
  const line = lines[at];
  if (isBlank(line)) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [headingNode(heading), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

/** The page itself has levels 1 and 2. */
function headingNode([, marks, text]) {
  const title = text.trimEnd().replace(/\s#+$/, "");
  return el(`h${Math.min(6, marks.length + 2)}`, {}, ...renderInline(title));
}

function codeBlock(lines, at, [, marks, language]) {
  const code = new CodeBlock(language);
  let next = at + 1;
  while (next < lines.length && !closes(lines[next], marks)) code.append(lines[next++] + "\n");
  return [code.node, next + 1];
}

function quote(lines, at, depth) {
  let next = at;
  const inner = [];
  while (next < lines.length && QUOTE.test(lines[next])) inner.push(lines[next++].replace(QUOTE, ""));
  return [el("blockquote", {}, ...renderBlocks(inner, depth + 1)), next];
}

function list(lines, at, depth) {
  const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
  const start = ordered ? parseInt(ITEM.exec(lines[at])[2], 10) : 1;
  const node = el(ordered ? "ol" : "ul", start === 1 ? {} : { start });
  let next = at;
  while (next < lines.length) {
    const marker = ITEM.exec(lines[next]);
    if (!marker || /\d/.test(marker[2]) !== ordered || RULE.test(lines[next])) break;
    const [item, after] = listItem(lines, next, marker, depth);
    node.append(item);
    next = after;
    if (next + 1 < lines.length && isBlank(lines[next]) && ITEM.test(lines[next + 1])) next += 1;
  }
  return [node, next];
}

/** Its own line, then what is indented below it, and a paragraph's lines that are not. */
function listItem(lines, at, marker, depth) {
  const inner = [lines[at].slice(marker[0].length)];
  let next = at + 1;
  for (; next < lines.length; next++) {
    const line = lines[next];
    const indent = line.search(/\S/);
    const continues = indent >= 2 && indent > marker[1].length;
    if (indent === -1) {
      const after = lines[next + 1];
      if (after === undefined || isBlank(after) || after.search(/\S/) < 2) break;
    } else if (!continues && (isBlank(inner[inner.length - 1]) || startsBlock(line))) break;
    inner.push(line.slice(Math.min(Math.max(indent, 0), marker[0].length)));
  }
  const nodes = renderBlocks(inner, depth + 1);
  if (nodes[0]?.tagName === "P") nodes.splice(0, 1, ...nodes[0].childNodes);
  return [el("li", {}, ...nodes), next];
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") &&
    TABLE_RULE.test(lines[at + 1].trim()) && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((rule) =>
    rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "end") : null);
  const row = (line, tag) => {
    const found = cells(line).slice(0, sides.length);
    return el("tr", {}, ...found.map((text, i) => el(tag, { class: sides[i] }, ...renderInline(text))));
  };
  const body = el("tbody");
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|")) body.append(row(lines[next++], "td"));
  const whole = el("table", {}, el("thead", {}, row(lines[at], "th")), body);
  return [el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, whole), next];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !isTable(lines, next) &&
    (depth >= MAX_DEPTH || !startsBlock(lines[next]))) next++;
  const node = el("p");
  const text = lines.slice(at, next).map((line) => line.trimStart()).join("\n");
  for (const piece of renderInline(text)) node.append(piece);
  return [node, next];
}

const closes = (line, marks) => {
  const end = line.trim();
  return end.length >= marks.length && end === marks[0].repeat(end.length);
};

class CodeBlock {
  #code = el("code");
  #last = null;
  #tail = document.createTextNode(""); // the line that is still being written

  constructor(language) {
    const name = language.trim().split(/\s/)[0];
    this.#code.append(this.#tail);
    this.node = el("figure", { class: "code" },
      el("figcaption", {}, el("span", {}, name), copyButton(() => this.#code.textContent)),
      el("pre", { tabindex: "0" }, this.#code));
  }

  append(text) {
    if (!this.#last || this.#last.length > CODE_NODE) {
      this.#last = document.createTextNode("");
      this.#tail.before(this.#last);
    }
    this.#last.appendData(text);
  }

  tail(text) {
    if (this.#tail.data !== text) this.#tail.data = text;
  }
}

export class MarkdownStream {
  parsedChars = 0; // work done so far; a test holds it to the text's length

  #root;
  #closed = 0; // child nodes that will not change
  #lines = []; // of the open block
  #openChars = 0;
  #partial = ""; // the line without its end
  #inList = false;
  #inner = null; // the fence of code inside a list or quote
  #code = null; // {block, marks} of top-level code

  constructor(root) {
    this.#root = root;
  }

  append(text) {
    if (!text) return;
    const lines = (this.#partial + text).split("\n");
    this.#partial = lines.pop();
    for (const line of lines) this.#line(line);
    if (this.#partial.length > OPEN_LIMIT) this.#cutPartial();
    this.#renderOpen();
  }

  /** The text is complete. */
  finish() {
    const last = this.#partial;
    this.#partial = "";
    if (this.#code) {
      this.#code.block.tail(closes(last, this.#code.marks) ? "" : last);
    } else {
      if (last) this.#line(last);
      this.#close();
    }
    this.#code = null;
  }

  #line(line) {
    if (this.#code) return this.#codeLine(line);
    const fence = FENCE.exec(line);
    if (fence && !this.#inner && (!this.#inList || line.search(/\S/) < 2)) return this.#openCode(fence);
    if (this.#endsBefore(line)) this.#close();
    this.#lines.push(line);
    this.#openChars += line.length + 1;
    this.#noteInner(line);
    this.#inList ||= ITEM.test(line) && !RULE.test(line);
    if (isBlank(line) && !this.#inList) this.#close();
    const long = this.#inner || line.trimStart().startsWith("|");
    if (this.#openChars > (long ? LONG_LIMIT : OPEN_LIMIT)) this.#close();
  }

  /** A list goes on over blank lines, as long as items or indented lines follow. */
  #endsBefore(line) {
    const last = this.#lines[this.#lines.length - 1];
    if (this.#inner || !this.#inList || last === undefined || !isBlank(last)) return false;
    return !isBlank(line) && line.search(/\S/) < 2 && !ITEM.test(line);
  }

  #noteInner(line) {
    const content = line.trimStart().replace(ITEM, "").trimStart();
    if (this.#inner) {
      if (closes(line, this.#inner)) this.#inner = null;
    } else if (this.#inList || ITEM.test(line)) {
      this.#inner = FENCE.exec(content)?.[1] ?? null;
    }
  }

  #openCode([, marks, language]) {
    this.#close();
    this.#code = { block: new CodeBlock(language), marks };
    this.#root.append(this.#code.block.node);
    this.#closed += 1;
  }

  #codeLine(line) {
    this.#code.block.tail("");
    if (closes(line, this.#code.marks)) this.#code = null;
    else this.#code.block.append(line + "\n");
  }

  /** A line without end is cut at a space, or anywhere. */
  #cutPartial() {
    if (this.#code) {
      this.#code.block.append(this.#partial);
      this.#partial = "";
    }
    while (this.#partial.length > OPEN_LIMIT) {
      const space = this.#partial.lastIndexOf(" ", OPEN_LIMIT);
      const cut = space > 0 ? space + 1 : OPEN_LIMIT;
      this.#line(this.#partial.slice(0, cut));
      this.#partial = this.#partial.slice(cut);
      this.#close();
    }
  }

  #close() {
    this.#draw(this.#lines); // without the unfinished line, which may have looked like anything
    this.#closed = this.#root.childNodes.length;
    this.#lines = [];
    this.#openChars = 0;
    this.#inList = false;
    this.#inner = null;
  }

  #renderOpen() {
    if (this.#code) {
      this.parsedChars += this.#partial.length;
      const isEnd = /^\s*[`~]+$/.test(this.#partial); // perhaps the fence's first half
      this.#code.block.tail(isEnd ? "" : this.#partial);
    } else this.#draw(this.#partial ? [...this.#lines, this.#partial] : this.#lines);
  }

  #draw(lines) {
    this.parsedChars += lines.reduce((sum, line) => sum + line.length + 1, 0);
    while (this.#root.childNodes.length > this.#closed) this.#root.lastChild.remove();
    for (const node of renderBlocks(lines)) this.#root.append(node);
  }
}

/** A complete text at once. */
export function renderMarkdown(root, text) {
  const stream = new MarkdownStream(root);
  stream.append(text);
  stream.finish();
}
