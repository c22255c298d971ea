// The list of conversations: choose, delete (with a second click), arrow keys.

import { byId, el, sureButton } from "./dom.js";

export class ConversationList {
  #list = byId("conversations");
  #actions;

  /** actions: {open(id), remove(id), isBusy(id)} */
  constructor(actions) {
    this.#actions = actions;
    this.#list.addEventListener("keydown", (event) => this.#onKey(event));
  }

  draw(conversations, currentId) {
    const hadFocus = this.#list.contains(document.activeElement);
    this.#list.replaceChildren(...conversations.map((one) => this.#item(one, one.id === currentId)));
    if (hadFocus) this.#list.querySelector("[aria-current]")?.focus();
  }

  #item({ id, title }, isCurrent) {
    const name = title || "New conversation";
    const open = el("button", {
      type: "button", class: "open", "data-id": id, "aria-current": isCurrent ? "page" : null,
      onclick: () => this.#actions.open(id),
    }, name);
    const remove = sureButton("×", () => this.#actions.remove(id), { "aria-label": `Delete ${name}` });
    return el("li", { class: this.#actions.isBusy(id) ? "busy" : null }, open, remove);
  }

  #onKey(event) {
    const item = event.target.closest("li");
    const step = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[event.key];
    if (step && !event.altKey) {
      event.preventDefault();
      item[step]?.querySelector(".open").focus();
    } else if (event.key === "Delete") item.querySelector(".remove").focus();
  }
}
