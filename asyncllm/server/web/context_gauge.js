// How much of the model's context the conversation takes, and what to do when it is nearly full.

import { contextUsed, numToDrop } from "./conversation.js";
import { button, byId, el } from "./dom.js";

const WARN_SHARE = 0.8;

export class ContextGauge {
  #meter = el("meter", { min: 0, low: WARN_SHARE, high: 0.95, optimum: 0, max: 1, "aria-label": "Context used" });
  #text = el("span");
  #warning = el("span", { class: "warning", role: "status" });
  #drop;

  /** `drop()` leaves the oldest turns out. */
  constructor(drop) {
    this.#drop = button("Drop the oldest turns", drop, { class: null });
    byId("context").append(this.#meter, this.#text, this.#warning, this.#drop);
  }

  draw(conversation, maxTokens) {
    const last = conversation?.messages.at(-1);
    byId("context").hidden = !maxTokens || !last;
    if (!maxTokens || !last) return;
    const used = contextUsed(conversation);
    const isRefused = last.error?.includes("maximum context length"); // the server's words for each limit
    const isFull = isRefused || used >= WARN_SHARE * maxTokens;
    const canDrop = isFull && numToDrop(conversation, maxTokens) !== null;
    const tooLong = canDrop ? "This is more than the context holds." : "This message alone is too long: edit it, or allow fewer tokens for the answer.";
    const warning = isRefused ? tooLong : isFull ? "The context is nearly full." : "";
    this.#meter.value = Math.min(1, used / maxTokens);
    this.#text.textContent = `${used.toLocaleString("en")} of ${maxTokens.toLocaleString("en")} tokens`;
    if (this.#warning.textContent !== warning) this.#warning.textContent = warning; // announced when it changes
    this.#drop.hidden = !canDrop;
  }
}
