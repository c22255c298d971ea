// Text that still grows, as Markdown (CommonMark and GitHub's tables). `marked` finds the blocks.
// Every block but the last is final: it is drawn once and left alone. The last one is drawn again
// with each update, and is cut where it grows longer than LIMIT; top-level code grows line by line.
// So the work per update is bounded, however long the answer.

import { CodeBlock } from "./code_block.js";
import { Marked, Tokenizer } from "./marked.js";
import { plain, renderTokens } from "./markdown_nodes.js";
import { MATH } from "./math.js";

const LIMIT = 4096; // characters of the open block
const MAX_DEPTH = 8; // quotes and lists in each other
const FENCE = /^( {0,3})(`{3,}|~{3,})([^\n]*)/;

/** Deeper quotes and lists are text: each level is a recursion of the lexer. */
class ShallowTokenizer extends Tokenizer {
  #depth = 0;

  blockquote(src) {
    return this.#deeper(() => super.blockquote(src));
  }

  list(src) {
    return this.#deeper(() => super.list(src));
  }

  #deeper(tokenize) {
    if (this.#depth >= MAX_DEPTH) return undefined;
    this.#depth += 1;
    try {
      return tokenize();
    } finally {
      this.#depth -= 1;
    }
  }
}

const marked = new Marked({ extensions: MATH });
marked.defaults.tokenizer = new ShallowTokenizer();

export class MarkdownStream {
  parsedChars = 0; // work done so far; a test holds it to the text's length

  #root;
  #rules; // of renderTokens
  #numClosed = 0; // child nodes that will not change
  #open = ""; // whole lines of the open block
  #rest = ""; // what follows them: lines not looked at, and one without its end
  #code = null; // {block, indent, marks} of open top-level code
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
    if (this.#code) this.#rest = this.#endCode(isEnd(this.#rest, this.#code.marks) ? "" : this.#rest);
    this.#open += this.#rest;
    this.#closeAll();
    if (Object.keys(this.#links).length) this.#mayLink.forEach((drawn) => this.#drawAgain(drawn));
    this.#mayLink = [];
  }

  /** Moves whole lines from rest to open, as many as there is room for; false when none is left. */
  #takeLines() {
    if (this.#code) return this.#takeCode();
    const room = LIMIT - this.#open.length;
    let end = this.#rest.lastIndexOf("\n", room - 1) + 1;
    if (!end) {
      const next = this.#rest.indexOf("\n") + 1 || this.#rest.length;
      if (next <= room || (!this.#rest.includes("\n") && next <= LIMIT)) return false;
      if (this.#open) return this.#makeRoom();
      end = this.#rest.lastIndexOf(" ", LIMIT - 1) + 1 || LIMIT; // a line without end
    }
    this.#open += this.#rest.slice(0, end);
    this.#rest = this.#rest.slice(end);
    if (!this.#open.endsWith("\n")) this.#closeAll();
    return true;
  }

  /** Closes all but the last block, or where it is the only one, that. */
  #makeRoom() {
    const before = this.#open.length;
    this.#settle();
    if (this.#open.length === before && !this.#code) this.#closeAll();
    return true;
  }

  /** What comes can change only the last block. */
  #settle() {
    if (this.#code || !this.#open) return;
    const tokens = this.#lex(this.#open);
    // Maths without an end may turn out to belong to the paragraph before it.
    const last = tokens.findLastIndex(({ type, text }) => type !== "space" && !(type === "math" && !text));
    if (last > 0) this.#close(tokens.slice(0, last));
    const fence = tokens[last]?.type === "code" ? FENCE.exec(this.#open) : null;
    if (fence && !isClosed(this.#open, fence[2])) this.#openCode(fence);
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
  }

  #drawAgain({ raw, nodes }) {
    const tokens = this.#lex(raw);
    nodes[0].before(...renderTokens(tokens, { ...this.#rules, isFinal: true }));
    for (const node of nodes) node.remove();
  }

  #lex(text) {
    this.parsedChars += text.length;
    const lexer = new marked.Lexer(marked.defaults);
    Object.assign(lexer.tokens.links, this.#links);
    return lexer.lex(text);
  }

  #draw() {
    if (this.#code) {
      const { block, marks } = this.#code;
      const mayEnd = isEnd(this.#rest, marks[0]); // perhaps the fence's first half
      block.tail(mayEnd ? "" : this.#rest);
    } else {
      this.#trim();
      const tokens = this.#lex(this.#open + this.#rest);
      this.#root.append(...renderTokens(tokens, { ...this.#rules, isFinal: false }));
    }
  }

  /** Removes what was drawn of the open block. */
  #trim() {
    while (this.#root.childNodes.length > this.#numClosed) this.#root.lastChild.remove();
  }

  // --- top-level code ---

  #openCode([line, { length: indent }, marks, language]) {
    this.#trim();
    this.#code = { block: new CodeBlock(plain(language)), indent, marks };
    this.#root.append(this.#code.block.node);
    this.#numClosed += 1;
    this.#rest = this.#open.slice(line.length + 1) + this.#rest;
    this.#open = "";
  }

  #takeCode() {
    const end = this.#rest.indexOf("\n");
    if (end === -1) return false;
    const line = this.#rest.slice(0, end);
    this.#rest = this.#rest.slice(end + 1);
    const { block, indent, marks } = this.#code;
    block.tail("");
    if (isEnd(line, marks)) this.#endCode();
    else block.append(line.slice(Math.min(indent, line.search(/[^ ]|$/))) + "\n");
    return true;
  }

  /** `last` is a line that the text ended in. */
  #endCode(last = "") {
    const { block } = this.#code;
    block.tail("");
    block.append(last);
    block.finish();
    this.#code = null;
    return "";
  }
}

/** Whether `line` ends code that was opened with `marks`. */
function isEnd(line, marks) {
  const end = /^ {0,3}(`+|~+)[ \t]*$/.exec(line)?.[1] ?? "";
  return end.length >= marks.length && end[0] === marks[0];
}

const isClosed = (text, marks) => text.split("\n").slice(1).some((line) => isEnd(line, marks));

function isWebAddress(url) {
  return URL.canParse(url) && /^https?:$/.test(new URL(url).protocol);
}
