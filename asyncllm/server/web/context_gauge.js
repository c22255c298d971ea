// How much of the model's context the conversation takes, and what to do when it is nearly full.

import { contextUsed, numToDrop } from "./conversation.js";
import { byId } from "./dom.js";

const WARN_SHARE = 0.8; // the meter's `low`, too
const TOO_LONG = "This message alone is too long: edit it, or allow fewer tokens for the answer.";
const [meter, text, warning, drop] = byId("context").children;

/** `act()` leaves the oldest turns out. */
export const onDrop = (act) => (drop.onclick = act);

export function drawGauge(conversation, maxTokens) {
  const last = conversation.messages.at(-1);
  byId("context").hidden = !maxTokens || !last;
  if (!maxTokens || !last) return;
  const used = contextUsed(conversation);
  const isRefused = last.error?.includes("maximum context length"); // the server's words for each limit
  const isFull = isRefused || used >= WARN_SHARE * maxTokens;
  const canDrop = isFull && numToDrop(conversation, maxTokens) !== null;
  const why = isRefused ? (canDrop ? "This is more than the context holds." : TOO_LONG) : isFull ? "The context is nearly full." : "";
  meter.value = Math.min(1, used / maxTokens);
  text.textContent = `${used.toLocaleString("en")} of ${maxTokens.toLocaleString("en")} tokens`;
  if (warning.textContent !== why) warning.textContent = why; // announced when it changes
  drop.hidden = !canDrop;
}
