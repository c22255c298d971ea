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

export const button = (label, onclick, attributes = {}) =>
  el("button", { type: "button", class: "quiet", onclick, ...attributes }, label);

/** A button that copies what `text()` returns and says so. */
export function copyButton(text) {
  const copy = button("Copy", async () => {
    copy.textContent = (await copyText(text())) ? "Copied" : "Could not copy";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }, { class: "quiet copy" });
  return copy;
}

/** A button that acts on its second click. */
export function sureButton(label, act, attributes = {}) {
  const ask = (isSure) => {
    sure.classList.toggle("sure", isSure);
    sure.textContent = isSure ? "Delete?" : label;
  };
  const press = () => (sure.classList.contains("sure") ? act() : ask(true));
  const sure = button(label, press, { class: "quiet idle remove", onblur: () => ask(false), ...attributes });
  return sure;
}

/** The clipboard API wants https or localhost; elsewhere the old command still works. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "offscreen", "aria-hidden": "true" }, text);
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** `act(event)` in place of sending: the policy allows no form to be sent. */
export function onSubmit(form, act) {
  form.onsubmit = (event) => {
    event.preventDefault();
    act(event);
  };
}

/** Enter sends the form of `area`; with Shift, or while a letter is composed, it does not. */
export function enterSends(area) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    area.form.requestSubmit();
  });
}

/** Calls `draw` at most once per frame, however often it is asked. */
export function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (!asked) requestAnimationFrame(() => draw((asked = false)));
    asked = true;
  };
}

/** Where there is room, panels are beside the main part, as in base.css; else drawers over it. */
export const wide = matchMedia("(min-width: 72rem)");

export function setPanel(name, isOpen) {
  document.body.dataset[name] = isOpen ? "open" : "closed";
  byId(`toggle-${name}`).setAttribute("aria-expanded", String(isOpen));
}

/** The value of JSON text; null for what is none. */
export function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** JSON text with its lines indented by `width`; text that is no JSON, or none yet, as it is. */
export const indented = (text, width) => (parse(text) === null ? text : JSON.stringify(parse(text), null, width));
