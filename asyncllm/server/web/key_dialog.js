// Asks for the API key when the server wants one.

import { setKey } from "./api.js";
import { byId } from "./dom.js";

/** Resolves true once a key was given, false when the dialog was closed without. */
export function askForKey(wasRefused) {
  const dialog = byId("key-dialog");
  byId("key").value = "";
  byId("key-why").textContent = wasRefused ? "The server did not accept this key." : "This server asks for a key.";
  byId("key-cancel").onclick = () => dialog.close();
  return new Promise((resolve) => {
    let given = false;
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault(); // nothing is sent: the policy allows no form to be
      given = true;
      setKey(byId("key").value, byId("key-remember").checked);
      dialog.close();
    };
    dialog.addEventListener("close", () => resolve(given), { once: true });
    dialog.showModal();
    byId("key").focus();
  });
}
