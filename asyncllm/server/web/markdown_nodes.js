// marked's tokens as DOM nodes, a pure function. The text was written by a model: nothing in it is
// ever read as HTML, which is shown as the text it is.

import { characterEntities } from "./character-entities.js";
import { CodeBlock } from "./code_block.js";
import { el } from "./dom.js";
import { mathNode } from "./math.js";

const ENTITY = /&(?:#x([0-9a-f]{1,6})|#(\d{1,7})|([a-z][a-z0-9]{1,31}));/gi;
const INDENT = /[ \t]*\n[ \t]*/g;
const ESCAPE = /\\([!-/:-@[-`{-~])/g;

/** `rules`: {canLink(url), isFinal}; text that is not final is drawn again soon, without colours. */
export function renderTokens(tokens, rules) {
  return (tokens ?? []).flatMap((token) => RENDER[token.type]?.(token, rules) ?? []);
}

const inside = (tag, attributes = {}) => (token, rules) =>
  el(tag, attributes, ...renderTokens(token.tokens, rules));

const RENDER = {
  blockquote: inside("blockquote"),
  br: () => el("br"),
  checkbox: ({ checked }) => el("input", { type: "checkbox", checked, disabled: true }),
  code: codeBlock,
  codespan: ({ text }) => el("code", {}, text),
  del: inside("del"),
  em: inside("em"),
  escape: ({ text }) => text,
  // The page itself has levels 1 and 2.
  heading: (token, rules) => inside(`h${Math.min(6, token.depth + 2)}`)(token, rules),
  hr: () => el("hr"),
  html: ({ text, block }) => (block ? el("p", {}, text.trimEnd()) : text),
  image: (token, rules) => anchor(token, plainText(token.tokens, rules), rules),
  link: (token, rules) => anchor(token, renderTokens(token.tokens, rules), rules),
  list,
  math: ({ text, isDisplay, raw }) => (text ? mathNode(text, isDisplay) : el("p", {}, raw.trimEnd())),
  paragraph: inside("p"),
  strong: inside("strong"),
  table,
  text: ({ text, tokens }, rules) => (tokens ? renderTokens(tokens, rules) : decode(text.replace(INDENT, "\n"))),
};

function codeBlock({ lang, text }, { isFinal }) {
  const block = new CodeBlock(plain(lang ?? ""));
  block.append(text && `${text}\n`);
  if (isFinal) block.finish();
  return block.node;
}

function list({ ordered, start, items }, rules) {
  const node = el(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {});
  node.append(...items.map((item) => inside("li")(item, rules)));
  return node;
}

/** A link that leads nowhere good stays the text it was written as. */
function anchor({ href, title, raw }, children, { canLink }) {
  const url = decode(href);
  if (!canLink(url)) return raw;
  const attributes = { href: url, title: title && decode(title), target: "_blank", rel: "noopener noreferrer" };
  return el("a", attributes, ...children);
}

const plainText = (tokens, rules) => [el("span", {}, ...renderTokens(tokens, rules)).textContent];

function table({ header, rows }, rules) {
  const row = (cells, tag) => el("tr", {}, ...cells.map(({ tokens, align }) =>
    el(tag, { class: { center: "center", right: "end" }[align] }, ...renderTokens(tokens, rules))));
  const body = el("tbody", {}, ...rows.map((cells) => row(cells, "td")));
  const whole = el("table", {}, el("thead", {}, row(header, "th")), body);
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, whole);
}

/** What follows a code's fence, without escapes. */
export const plain = (info) => decode(info.replace(ESCAPE, "$1"));

const decode = (text) => text.replace(ENTITY, (whole, hex, decimal, name) =>
  name ? (characterEntities[name] ?? whole) : character(hex ? parseInt(hex, 16) : Number(decimal)));

function character(code) {
  const isValid = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000);
  return isValid ? String.fromCodePoint(code) : "\ufffd";
}
