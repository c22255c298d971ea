// An answer as its tokens, tinted by how unsure the model was; hovering (or the arrow keys) shows
// the likeliest alternatives.

import { byId, el } from "./dom.js";

export class TokensView {
  node = el("div", {
    class: "tokens", tabindex: "0", role: "group", hidden: true,
    "aria-label": "Tokens, arrow keys to step through",
  });

  #tokens = [];
  #current = null;

  constructor() {
    this.node.addEventListener("pointerover", ({ target }) => this.#show(target.closest("span")));
    this.node.addEventListener("pointerleave", hideTip);
    this.node.addEventListener("blur", hideTip);
    this.node.addEventListener("keydown", (event) => this.#step(event));
  }

  /** `tokens` only ever grows. */
  update(tokens) {
    for (let i = this.#tokens.length; i < tokens.length; i++) {
      const token = tokens[i];
      const node = el("span", { "data-index": i }, token.text);
      node.style.setProperty("--doubt", (1 - Math.exp(token.logprob)).toFixed(3));
      this.node.append(node);
      this.#tokens.push(token);
    }
  }

  #step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const all = this.node.children;
    const next = this.#current ? Number(this.#current.dataset.index) + by : 0;
    if (all[next]) this.#show(all[next]);
  }

  #show(node) {
    if (!node) return;
    this.#current?.classList.remove("current");
    this.#current = node;
    node.classList.add("current");
    showTip(node, this.#tokens[Number(node.dataset.index)]);
  }
}

function showTip(anchor, token) {
  const others = token.top.filter((other) => other.text !== token.text);
  const rows = [token, ...others].map((one, i) => {
    const bar = el("i");
    bar.style.setProperty("--p", Math.exp(one.logprob).toFixed(4));
    return el("tr", { class: i ? null : "own" },
      el("td", {}, visible(one.text)), el("td", {}, percent(one.logprob)), el("td", {}, bar));
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
