// TeX between \( \), \[ \], $$ $$ and $ $: found for marked, drawn as MathML from Temml's tree.

import { el } from "./dom.js";
import temml from "./temml.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const PAIRS = [["\\(", "\\)"], ["\\[", "\\]"], ["$$", "$$"], ["$", "$"]];
const BLANK_LINE = /\n[ \t]*\n/;

/** Extensions of marked's lexer: tokens {type: "math", raw, text, isDisplay}. */
export const MATH = [
  { name: "math", level: "block", start: (src) => src.search(/(?<=\n) {0,3}(?:\$\$|\\\[)/), tokenizer: blockMath },
  { name: "math", level: "inline", start: (src) => src.search(/\\[([]|\$/), tokenizer: inlineMath },
];

/**
 * A line of its own, or several where the first holds no more than the start. Without an end, which
 * may still come, they are one block of text up to a blank line.
 */
function blockMath(src) {
  const open = /^ {0,3}(\$\$|\\\[)/.exec(src);
  if (!open) return undefined;
  const isLong = /^[ \t]*(?:\\begin\{.*)?(?:\n|$)/.test(src.slice(open[0].length));
  const end = src.indexOf(open[1] === "$$" ? "$$" : "\\]", open[0].length);
  const stop = src.search(isLong ? BLANK_LINE : /\n|$/);
  if (stop !== -1 && (end === -1 || end > stop)) return undefined;
  if (end === -1) return { type: "math", raw: src, text: "" };
  const after = /^[ \t]*(?:\n|$)/.exec(src.slice(end + 2));
  if (!after) return undefined;
  const raw = src.slice(0, end + 2 + after[0].length);
  return { type: "math", raw, text: src.slice(open[0].length, end), isDisplay: true };
}

function inlineMath(src) {
  const pair = PAIRS.find(([open]) => src.startsWith(open));
  const end = pair ? src.indexOf(pair[1], pair[0].length) : -1;
  if (end === -1) return undefined;
  const text = src.slice(pair[0].length, end);
  const raw = src.slice(0, end + pair[1].length);
  if (!/[\p{L}\p{N}]/u.test(text) || BLANK_LINE.test(text)) return undefined;
  // One dollar is mostly money: "$5 and $6" is none of these.
  if (pair[0] === "$" && (/^\s|\s$|\n/.test(text) || /\d/.test(src[raw.length] ?? ""))) return undefined;
  return { type: "math", raw, text, isDisplay: pair[0] === "\\[" || pair[0] === "$$" };
}

/** What Temml does not understand stays TeX. */
export function mathNode(text, isDisplay) {
  try {
    return draw(temml.__renderToMathMLTree(text, { displayMode: isDisplay, throwOnError: true, maxSize: [20, 20] }));
  } catch {
    return el("code", { class: "tex" }, text);
  }
}

/** The policy allows no style attribute, so that Temml's own way to nodes cannot be taken. */
function draw(tree) {
  if (tree.text !== undefined) return document.createTextNode(tree.text);
  const node = tree.type ? document.createElementNS(MATHML, tree.type) : document.createDocumentFragment();
  node.append(...tree.children.map(draw));
  if (!tree.type) return node;
  const { style = "", ...attributes } = tree.attributes;
  node.style.cssText = style;
  Object.assign(node.style, tree.style);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (tree.classes.length) node.setAttribute("class", tree.classes.join(" "));
  return node;
}
