// Elements are made here and only here: text goes in as text, never as HTML.

/** el("button", {type: "button", class: "x", onclick: f}, "text", node, ...) */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** A button that copies what `text()` returns and says so. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "quiet copy" }, label);
  button.addEventListener("click", async () => {
    const done = await copyText(text());
    button.textContent = done ? "Copied" : "Could not copy";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

/** A button that acts on its second click. */
export function sureButton(label, act, attributes = {}) {
  const button = el("button", { type: "button", class: "quiet idle remove", ...attributes }, label);
  button.addEventListener("click", () => {
    if (button.classList.contains("sure")) return act();
    button.classList.add("sure");
    button.textContent = "Delete?";
  });
  button.addEventListener("blur", () => {
    button.classList.remove("sure");
    button.textContent = label;
  });
  return button;
}

/** The clipboard API wants https or localhost; elsewhere the old command still works. */
async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // refused: fall through to the old way
    }
  }
  const area = el("textarea", { class: "offscreen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** Calls `draw` at most once per frame, however often it is asked. */
export function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

/** Turns between the answers, or the questions, that were at one place.
 * Null where there was one only. `actions`: {turn(message, by)} */
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
