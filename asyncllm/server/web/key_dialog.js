// Asks for the API key when the server wants one.

import { setKey } from "./api.js";
import { byId, el } from "./dom.js";

/** Resolves true once a key was given, false when the dialog was closed without. */
export function askForKey(wasRefused) {
  const dialog = byId("key-dialog");
  const input = el("input", { type: "password", id: "key", required: true, autocomplete: "off" });
  const remember = el("input", { type: "checkbox", id: "key-remember" });
  const form = el("form", { method: "dialog" },
    el("h2", { id: "key-title" }, "API key"),
    el("p", {}, wasRefused ? "The server did not accept this key." : "This server asks for a key."),
    el("label", { for: "key" }, "Key"),
    input,
    el("label", { class: "check" }, remember, "Remember it in this browser"),
    el("div", { class: "buttons" },
      el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"),
      el("button", { type: "submit", class: "primary" }, "Continue")));
  dialog.replaceChildren(form);
  return new Promise((resolve) => {
    let given = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault(); // nothing is sent: the policy allows no form to be
      given = true;
      setKey(input.value, remember.checked);
      dialog.close();
    });
    dialog.addEventListener("close", () => resolve(given), { once: true });
    dialog.showModal();
    input.focus();
  });
}
