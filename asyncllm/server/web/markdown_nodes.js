// marked's tokens as DOM nodes. The text was written by a model: nothing in it is ever read as HTML,
// which is shown as the text it is.

import { characterEntities } from "./character-entities.js";
import { copyButton, el } from "./dom.js";
import highlighter from "./highlight.js";
import { mathNode } from "./math.js";

const ENTITY = /&(?:#x([0-9a-f]{1,6})|#(\d{1,7})|([a-z][a-z0-9]{1,31}));/gi;
const INDENT = /[ \t]*\n[ \t]*/g;
const ESCAPE = /\\([!-/:-@[-`{-~])/g;
const MAX_COLOURED = 50_000; // characters; longer code stays plain

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
  heading: (token, rules) => inside(`h${Math.min(6, token.depth + 2)}`)(token, rules), // the page has levels 1 and 2
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
  const attributes = { start: ordered && start !== 1 && String(start) };
  return el(ordered ? "ol" : "ul", attributes, ...items.map((item) => inside("li")(item, rules)));
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

const character = (code) =>
  code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000) ? String.fromCodePoint(code) : "\ufffd";

/** A figure that code is appended to, coloured by highlight.js when it is complete. */
export class CodeBlock {
  #code = el("code");
  #tail = document.createTextNode(""); // the line that is still being written

  /** `info` is what follows the opening fence: its first word names the language. */
  constructor(info) {
    this.language = info.trim().split(/\s/)[0];
    this.#code.append(this.#tail);
    this.node = el("figure", { class: "code" },
      el("figcaption", {}, el("span", {}, this.language), copyButton(() => this.#code.textContent)),
      el("pre", { tabindex: "0" }, this.#code));
  }

  append(text) {
    this.#tail.before(text); // text nodes side by side: none is ever copied
  }

  tail(text) {
    this.#tail.data = text;
  }

  /** Nothing is appended any more. */
  finish() {
    const text = this.#code.textContent;
    if (!highlighter.getLanguage(this.language) || text.length > MAX_COLOURED) return;
    const { _emitter: emitter } = highlighter.highlight(text, { language: this.language });
    this.#code.replaceChildren(...emitter.rootNode.children.map(coloured));
  }
}

/** highlight.js's token tree: strings, and {scope, children}. */
function coloured(token) {
  const scope = token.scope?.split(".")[0];
  return token.children ? el("span", { class: scope && `hl-${scope}` }, ...token.children.map(coloured)) : token;
}
