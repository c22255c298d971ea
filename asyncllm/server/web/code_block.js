// A figure that code is appended to, coloured by highlight.js when it is complete.

import { copyButton, el } from "./dom.js";
import highlighter from "./highlight.js";

const CODE_NODE = 4096; // characters of one text node; appending to a longer one copies it all
const MAX_COLOURED = 50_000; // characters; longer code stays plain

export class CodeBlock {
  #code = el("code");
  #last = null;
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
    if (!this.#last || this.#last.length > CODE_NODE) {
      this.#last = document.createTextNode("");
      this.#tail.before(this.#last);
    }
    this.#last.appendData(text);
  }

  tail(text) {
    if (this.#tail.data !== text) this.#tail.data = text;
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
  if (typeof token === "string") return token;
  const scope = token.scope?.split(".")[0];
  return el("span", { class: scope && `hl-${scope}` }, ...token.children.map(coloured));
}
