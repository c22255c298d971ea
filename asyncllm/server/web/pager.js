// Turns between the answers, or the questions, that were at one place.

import { el } from "./dom.js";

/** Null where there was one only. `actions`: {turn(message, by)} */
export function pager(message, actions) {
  const { before = [], after = [] } = message.branches ?? {};
  if (!before.length && !after.length) return null;
  const turn = (by, label, sign, isThere) => el("button", {
    type: "button", class: "quiet idle", "aria-label": label, disabled: !isThere,
    onclick: () => actions.turn(message, by),
  }, sign);
  return el("span", { class: "pager" },
    turn(-1, "The one before", "‹", before.length),
    `${before.length + 1} / ${before.length + 1 + after.length}`,
    turn(1, "The one after", "›", after.length));
}
