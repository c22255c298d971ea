// Text that still grows, as Markdown (CommonMark and GitHub's tables). `marked` finds the blocks.
// Every block but the last is final: it is drawn once and left alone. The last one is drawn again
// with each update, and is cut where it grows longer than LIMIT; top-level code grows by whole lines.
// So the work per update is bounded, however long the answer.

import { Marked, Tokenizer } from "./marked.js";
import { CodeBlock, plain, renderTokens } from "./markdown_nodes.js";
import { MATH } from "./math.js";

const LIMIT = 4096; // characters of the open block
const MAX_DEPTH = 8; // quotes and lists in each other
const FENCE = /^( {0,3})(`{3,}|~{3,})([^\n]*)\n?/;
const MAY_END = /^ {0,3}(`+|~+)[ \t]*$/; // perhaps a closing fence's first half

let depth = 0;

/** Deeper quotes and lists are text: each level is a recursion of the lexer. */
function shallow(tokenize) {
  return function (src) {
    if (depth >= MAX_DEPTH) return undefined;
    depth += 1;
    try {
      return tokenize.call(this, src);
    } finally {
      depth -= 1;
    }
  };
}

const marked = new Marked({ extensions: MATH });
const { blockquote, list } = Tokenizer.prototype;
marked.defaults.tokenizer = Object.assign(new Tokenizer(), { blockquote: shallow(blockquote), list: shallow(list) });

export class MarkdownStream {
  parsedChars = 0; // work done so far; a test holds it to the text's length

  #root;
  #rules; // of renderTokens
  #numClosed = 0; // child nodes that will not change
  #open = ""; // whole lines of the open block
  #rest = ""; // what follows them: lines not looked at, and one without its end
  #code = null; // {block, indent, end} of open top-level code; `open` is empty then
  #links = {}; // [name]: address
  #mayLink = []; // {raw, nodes}: closed blocks with brackets, for names defined later

  /** `canLink(url)` says which addresses become links. */
  constructor(root, canLink = isWebAddress) {
    this.#root = root;
    this.#rules = { canLink };
  }

  append(text) {
    if (!text) return;
    this.#rest += text.replaceAll("\r", "");
    while (this.#takeLines()) this.#settle();
    this.#draw();
  }

  /** The text is complete. */
  finish() {
    this.#open += this.#rest;
    if (this.#code) this.#takeCode();
    this.#code?.block.finish();
    this.#code = null;
    this.#closeAll();
    for (const { raw, nodes } of Object.keys(this.#links).length ? this.#mayLink : []) {
      nodes[0].before(...renderTokens(this.#lex(raw), { ...this.#rules, isFinal: true }));
      for (const node of nodes) node.remove();
    }
  }

  /** Moves whole lines from rest to open, as many as there is room for; false when none is left. */
  #takeLines() {
    const { length } = this.#open;
    let end = this.#rest.lastIndexOf("\n", LIMIT - length - 1) + 1;
    if (!end) {
      const isPart = !this.#rest.includes("\n");
      if (isPart && (this.#code || this.#rest.length <= LIMIT)) return false;
      if (length) return this.#closeAll(); // the only block, and too long
      if (this.#code) end = this.#rest.indexOf("\n") + 1;
      else end = this.#rest.lastIndexOf(" ", LIMIT - 1) + 1 || LIMIT; // a line without end
    }
    this.#open += this.#rest.slice(0, end);
    this.#rest = this.#rest.slice(end);
    return this.#open.endsWith("\n") || this.#closeAll();
  }

  /** What comes can change only the last block. */
  #settle() {
    if (this.#code) return this.#takeCode();
    const tokens = this.#lex(this.#open);
    // Maths without an end may turn out to belong to the paragraph before it.
    const last = tokens.findLastIndex(({ type, text }) => type !== "space" && !(type === "math" && !text));
    if (last > 0) this.#close(tokens.slice(0, last));
    const fence = tokens[last]?.type === "code" && FENCE.exec(this.#open);
    if (fence) this.#openCode(fence);
  }

  #close(tokens) {
    const raw = tokens.map((token) => token.raw).join("");
    this.#trim();
    const nodes = renderTokens(tokens, { ...this.#rules, isFinal: true });
    this.#root.append(...nodes);
    this.#numClosed = this.#root.childNodes.length;
    this.#open = this.#open.slice(raw.length);
    marked.walkTokens(tokens, ({ type, tag, href, title }) => {
      if (type === "def") this.#links[tag] ??= { href, title };
    });
    if (raw.includes("]") && nodes.length) this.#mayLink.push({ raw, nodes });
  }

  #closeAll() {
    this.#close(this.#lex(this.#open));
    this.#open = "";
    return true;
  }

  #lex(text) {
    this.parsedChars += text.length;
    const lexer = new marked.Lexer(marked.defaults);
    Object.assign(lexer.tokens.links, this.#links);
    return lexer.lex(text);
  }

  #draw() {
    if (this.#code) return this.#code.block.tail(MAY_END.test(this.#rest) ? "" : this.#rest);
    this.#trim();
    const tokens = this.#lex(this.#open + this.#rest);
    this.#root.append(...renderTokens(tokens, { ...this.#rules, isFinal: false }));
  }

  /** Removes what was drawn of the open block. */
  #trim() {
    while (this.#root.childNodes.length > this.#numClosed) this.#root.lastChild.remove();
  }

  #openCode([line, { length: indent }, marks, language]) {
    this.#trim();
    const end = new RegExp(`^ {0,3}${marks}${marks[0]}*[ \t]*(?:\n|$)`, "m");
    this.#code = { block: new CodeBlock(plain(language)), indent, end };
    this.#root.append(this.#code.block.node);
    this.#numClosed += 1;
    this.#open = this.#open.slice(line.length);
    this.#takeCode();
  }

  /** Moves the open lines into the code, up to the one that ends it. */
  #takeCode() {
    const { block, indent, end } = this.#code;
    const found = end.exec(this.#open);
    block.tail("");
    block.append(this.#open.slice(0, found?.index).replace(new RegExp(`^ {0,${indent}}`, "gm"), ""));
    this.#open = found ? this.#open.slice(found.index + found[0].length) : "";
    if (!found) return;
    block.finish();
    this.#code = null;
    this.#settle();
  }
}

const isWebAddress = (url) => URL.canParse(url) && /^https?:$/.test(new URL(url).protocol);
