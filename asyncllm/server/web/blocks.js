// Markdown's blocks: whole lines in, DOM nodes out, a pure function. The text was written by a model:
// nothing in it is ever read as HTML.

import { copyButton, el } from "./dom.js";
import { renderInline } from "./inline.js";

const CODE_NODE = 4096; // characters of one text node; appending to a longer one copies it all
const MAX_DEPTH = 8; // quotes and lists in each other

// Each of these is linear in the line: no two neighbours that could share a run of spaces.
export const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
export const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
export const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;

export const isBlank = (line) => /^\s*$/.test(line);

/** Whether `line` ends code that was opened with `marks`. */
export function closes(line, marks) {
  const end = line.trim();
  return end.length >= marks.length && end === marks[0].repeat(end.length);
}

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
  const scroller = { class: "table", tabindex: "0", role: "region", "aria-label": "Table" };
  return [el("div", scroller, whole), next];
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

/** A figure that code is appended to. */
export class CodeBlock {
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
