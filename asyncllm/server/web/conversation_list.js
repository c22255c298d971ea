// The list of conversations: choose, find, rename, delete (with a second press), arrow keys.

import { button, byId, el, sureButton } from "./dom.js";

export class ConversationList {
  #list = byId("conversations");
  #find = byId("find");
  #actions;
  #drawn = [[], ""];

  /** actions: {open(id), rename(id, title), remove(id), isBusy(id)} */
  constructor(actions) {
    this.#actions = actions;
    this.#list.addEventListener("keydown", (event) => this.#onKey(event));
    this.#find.addEventListener("input", () => this.draw(...this.#drawn));
  }

  draw(conversations, currentId) {
    this.#drawn = [conversations, currentId];
    const words = this.#find.value.trim().toLowerCase();
    const shown = conversations.filter((one) => hasWords(one, words));
    const hadFocus = this.#list.contains(document.activeElement);
    this.#list.replaceChildren(...shown.map((one) => this.#item(one, one.id === currentId)));
    if (words && !shown.length) this.#list.append(el("li", { class: "none" }, "Nothing has these words."));
    if (hadFocus) this.#list.querySelector("[aria-current]")?.focus();
  }

  #item({ id, title }, isCurrent) {
    const name = title || "New conversation";
    const rename = () => {
      const input = this.#editor(id, name);
      item.replaceChildren(input);
      input.select();
    };
    const item = el("li", { class: this.#actions.isBusy(id) ? "busy" : null, onkeydown: ({ key }) => key === "F2" && rename() },
      button(name, () => this.#actions.open(id), {
        class: "open", "data-id": id, title: `${name} (F2 renames it)`, "aria-current": isCurrent ? "page" : null, ondblclick: rename,
      }),
      button("✎", rename, { class: "rename", "aria-label": `Rename ${name}` }),
      sureButton("×", () => this.#actions.remove(id), { "aria-label": `Delete ${name}` }));
    return item;
  }

  #editor(id, name) {
    const input = el("input", { value: name, maxlength: 200, "aria-label": "Name of the conversation" });
    const done = (title) => {
      input.onblur = null; // drawing the list again takes the focus away
      const hadFocus = document.activeElement === input;
      this.#actions.rename(id, title.trim() || name);
      if (hadFocus) this.#list.querySelector(`[data-id="${id}"]`)?.focus();
    };
    input.onblur = () => done(input.value);
    input.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // or it presses the button that gets the focus
      done(event.key === "Enter" ? input.value : name);
    };
    return input;
  }

  #onKey(event) {
    const item = event.target.closest("li");
    const next = item?.[{ ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[event.key]];
    if (event.key === "Delete") item.querySelector(".remove").focus();
    if (!next || event.altKey) return;
    event.preventDefault();
    next.querySelector(".open")?.focus();
  }
}

const hasWords = ({ title, messages }, words) =>
  [title, ...messages.map(({ content }) => content)].some((text) => text.toLowerCase().includes(words));
