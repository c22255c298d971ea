// Text that still grows, as Markdown. Blocks that have ended are left alone, a code block grows line
// by line, and only the block still open is rendered again, which is never more than OPEN_LIMIT
// characters (LONG_LIMIT in a table or in code inside a list). So the work per update is bounded,
// however long the answer.

import { closes, CodeBlock, FENCE, isBlank, ITEM, renderBlocks, RULE } from "./blocks.js";

const OPEN_LIMIT = 4096;
const LONG_LIMIT = 8192;

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
