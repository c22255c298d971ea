// How much of the model's context the conversation takes, and what to do when it is nearly full.

import { contextUsed, numToDrop } from "./conversation.js";
import { byId, el } from "./dom.js";

const WARN_SHARE = 0.8;

export class ContextGauge {
  #meter = el("meter", { min: 0, low: WARN_SHARE, high: 0.95, optimum: 0, max: 1, "aria-label": "Context used" });
  #text = el("span");
  #warning = el("span", { class: "warning", role: "status" });
  #drop;

  /** `drop()` leaves the oldest turns out. */
  constructor(drop) {
    this.#drop = el("button", { type: "button", onclick: drop }, "Drop the oldest turns");
    byId("context").append(this.#meter, this.#text, this.#warning, this.#drop);
  }

  draw(conversation, maxTokens) {
    const isKnown = Boolean(maxTokens && conversation?.messages.length);
    byId("context").hidden = !isKnown;
    if (!isKnown) return;
    const used = contextUsed(conversation);
    const isFull = used >= WARN_SHARE * maxTokens || isRefused(conversation.messages.at(-1));
    const canDrop = isFull && numToDrop(conversation, maxTokens) !== null;
    this.#meter.value = Math.min(1, used / maxTokens);
    set(this.#text, `${used.toLocaleString("en")} of ${maxTokens.toLocaleString("en")} tokens`);
    set(this.#warning, isFull ? warning(conversation.messages.at(-1), canDrop) : "");
    this.#drop.hidden = !canDrop;
  }
}

/** Announced when it changes, not with each token. */
function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The server says so in these words, whichever limit was met. */
const isRefused = (message) => message.error?.includes("maximum context length") ?? false;

function warning(last, canDrop) {
  if (!isRefused(last)) return "The context is nearly full.";
  return canDrop ? "This is more than the context holds." : "This message alone is too long: edit it, or allow fewer tokens for the answer.";
}
