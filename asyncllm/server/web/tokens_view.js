// An answer as its tokens, tinted by how unsure the model was; hovering (or the arrow keys) shows
// the likeliest alternatives.

import { byId, el } from "./dom.js";

export class TokensView {
  node = el("div", {
    class: "tokens", tabindex: "0", role: "group", hidden: true,
    "aria-label": "Tokens, arrow keys to step through",
    onpointerover: ({ target }) => this.#show(target.closest("span")),
    onpointerleave: hideTip, onblur: hideTip, onkeydown: (event) => this.#step(event),
  });

  #tokens = new Map(); // by their nodes
  #current = null;

  /** `tokens` only ever grows. */
  update(tokens) {
    for (const token of tokens.slice(this.#tokens.size)) {
      const node = el("span", {}, token.text);
      node.style.setProperty("--doubt", (1 - Math.exp(token.logprob)).toFixed(3));
      this.node.append(node);
      this.#tokens.set(node, token);
    }
  }

  #step(event) {
    const side = { ArrowLeft: "previousSibling", ArrowRight: "nextSibling" }[event.key];
    if (!side) return;
    event.preventDefault();
    this.#show(this.#current ? this.#current[side] : this.node.firstChild);
  }

  #show(node) {
    if (!node) return;
    this.#current?.classList.remove("current");
    this.#current = node;
    node.classList.add("current");
    showTip(node, this.#tokens.get(node));
  }
}

function showTip(anchor, token) {
  const others = token.top.filter((other) => other.text !== token.text);
  const rows = [token, ...others].map(({ text, logprob }, i) => {
    const bar = el("i");
    bar.style.setProperty("--p", Math.exp(logprob).toFixed(4));
    return el("tr", { class: i ? null : "own" }, ...[visible(text), percent(logprob), bar].map((cell) => el("td", {}, cell)));
  });
  const tip = byId("tip");
  tip.replaceChildren(el("table", {}, el("tbody", {}, ...rows)));
  tip.hidden = false;
  const at = anchor.getBoundingClientRect();
  const below = at.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? at.bottom + 6 : at.top - tip.offsetHeight - 6}px`;
}

const hideTip = () => (byId("tip").hidden = true);

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

function percent(logprob) {
  const p = Math.exp(logprob) * 100;
  return p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
}
