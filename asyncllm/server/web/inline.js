// Markdown inside one block: code, emphasis, links. One pass, linear in the text's length; what is
// not Markdown stays text. Only http and https links become links.

import { el } from "./dom.js";

const PLAIN = /(?:[^\\`*_~[\]!h]|h(?!ttps?:\/\/)|!(?!\[))+/y;
const TARGET = /\(\s*<?(https?:[^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/iy;
const BARE = /https?:\/\/[^\s<>"'`]+/iy;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const MAX_OPEN = 60; // delimiters of one kind that wait for their end; the rest stay text
const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };

/** Nodes for `text`. */
export function renderInline(text) {
  return new Inline(text).run();
}

class Inline {
  #text;
  #at = 0;
  #out = []; // strings and nodes
  #open = { "*": [], _: [], "~": [] }; // {index in out, count}
  #brackets = []; // indices in out of "["
  #ticks = null; // run length -> positions of backtick runs, for finding an end in one step

  constructor(text) {
    this.#text = text;
  }

  run() {
    const text = this.#text;
    while (this.#at < text.length) {
      PLAIN.lastIndex = this.#at;
      const plain = PLAIN.exec(text);
      if (plain) this.#put(plain[0]);
      else this.#special(text[this.#at]);
    }
    return this.#out;
  }

  #special(char) {
    if (char === "\\") this.#escape();
    else if (char === "`") this.#code();
    else if (char === "[") this.#bracket();
    else if (char === "]") this.#link();
    else if (char === "!") this.#at += 1; // of an image, which is shown as a link
    else if (char === "h") this.#bareLink();
    else this.#delimiters(char);
  }

  #put(node, length = node.length) {
    this.#out.push(node);
    this.#at += length;
  }

  #escape() {
    const next = this.#text[this.#at + 1] ?? "";
    if (PUNCTUATION.test(next)) this.#put(next, 2);
    else this.#put("\\");
  }

  #run(char) {
    let end = this.#at;
    while (this.#text[end] === char) end += 1;
    return end - this.#at;
  }

  #code() {
    const length = this.#run("`");
    this.#ticks ??= tickRuns(this.#text);
    const from = this.#at + length;
    const positions = this.#ticks.get(length);
    while (positions.length && positions[positions.length - 1] < from) positions.pop();
    if (!positions.length) return this.#put("`".repeat(length));
    const end = positions[positions.length - 1];
    let code = this.#text.slice(from, end);
    if (/^ .*[^ ].* $/s.test(code)) code = code.slice(1, -1);
    this.#put(el("code", {}, code), end + length - this.#at);
  }

  #bracket() {
    if (this.#brackets.length < MAX_OPEN) this.#brackets.push(this.#out.length);
    this.#put("[");
  }

  #link() {
    const start = this.#brackets.pop();
    TARGET.lastIndex = this.#at + 1;
    const target = start === undefined ? null : TARGET.exec(this.#text);
    const link = target && anchor(target[1]);
    if (!link) return this.#put("]");
    this.#forgetFrom(start);
    this.#brackets = []; // no link in a link
    append(link, this.#out.splice(start).slice(1));
    this.#put(link, 1 + target[0].length);
  }

  #bareLink() {
    BARE.lastIndex = this.#at;
    const inside = this.#brackets.length || /\w/.test(this.#text[this.#at - 1] ?? "");
    const found = inside ? null : BARE.exec(this.#text);
    const url = found && found[0].replace(/[.,;:!?*_~)\]]{1,20}$/, "");
    const link = url && anchor(url);
    if (!link) return this.#put("h");
    link.append(url);
    this.#put(link, url.length);
  }

  #delimiters(char) {
    const count = this.#run(char);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + count] ?? " ";
    this.#at += count;
    const inWord = char === "_" && /\w/.test(before) && /\w/.test(after);
    let left = count;
    if (!/\s/.test(before) && !inWord) left = this.#close(char, left);
    const open = this.#open[char];
    if (left && !/\s/.test(after) && !inWord && open.length < MAX_OPEN) {
      open.push({ index: this.#out.length, count: left });
    }
    if (left) this.#out.push(char.repeat(left));
  }

  /** Wraps what lies between earlier delimiters and here; returns how many are left over. */
  #close(char, left) {
    const open = this.#open[char];
    while (left && open.length) {
      const opener = open[open.length - 1];
      const used = Math.min(left, opener.count, 2);
      const tag = TAGS[char][used - 1];
      if (!tag || this.#out.length === opener.index + 1) break;
      const node = append(el(tag), this.#out.splice(opener.index + 1));
      opener.count -= used;
      left -= used;
      this.#forgetFrom(opener.index + 1);
      this.#out[opener.index] = char.repeat(opener.count);
      if (!opener.count) open.pop();
      this.#out.push(node);
    }
    return left;
  }

  /** Delimiters from `index` on are inside something that has ended. */
  #forgetFrom(index) {
    for (const open of Object.values(this.#open)) {
      while (open.length && open[open.length - 1].index >= index) open.pop();
    }
    while (this.#brackets.length && this.#brackets[this.#brackets.length - 1] >= index) {
      this.#brackets.pop();
    }
  }
}

/** Positions by length, the last first, so that the next one is at the array's end. */
function tickRuns(text) {
  const runs = new Map();
  for (const match of text.matchAll(/`+/g)) {
    const length = match[0].length;
    if (!runs.has(length)) runs.set(length, []);
    runs.get(length).push(match.index);
  }
  for (const positions of runs.values()) positions.reverse();
  return runs;
}

function anchor(url) {
  if (!URL.canParse(url) || !/^https?:$/.test(new URL(url).protocol)) return null;
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer" });
}

function append(node, children) {
  for (const child of children) node.append(child);
  return node;
}
