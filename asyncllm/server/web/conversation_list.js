// The list of conversations: choose, find, rename, delete (with a second press), arrow keys.

import { byId, el, sureButton } from "./dom.js";

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
    const shown = words ? conversations.filter((one) => hasWords(one, words)) : conversations;
    const hadFocus = this.#list.contains(document.activeElement);
    this.#list.replaceChildren(...shown.map((one) => this.#item(one, one.id === currentId)));
    if (words && !shown.length) this.#list.append(el("li", { class: "none" }, "Nothing has these words."));
    if (hadFocus) this.#list.querySelector("[aria-current]")?.focus();
  }

  #item({ id, title }, isCurrent) {
    const name = title || "New conversation";
    const item = el("li", { class: this.#actions.isBusy(id) ? "busy" : null });
    const rename = () => {
      item.replaceChildren(this.#editor(id, name));
      item.firstChild.select();
    };
    const open = el("button", {
      type: "button", class: "open", "data-id": id, title: `${name} (F2 renames it)`,
      "aria-current": isCurrent ? "page" : null, onclick: () => this.#actions.open(id), ondblclick: rename,
    }, name);
    item.addEventListener("keydown", ({ key }) => key === "F2" && rename());
    const remove = sureButton("×", () => this.#actions.remove(id), { "aria-label": `Delete ${name}` });
    const pen = el("button", { type: "button", class: "rename", "aria-label": `Rename ${name}`, onclick: rename }, "✎");
    item.append(open, pen, remove);
    return item;
  }

  #editor(id, name) {
    const input = el("input", { value: name, maxlength: 200, "aria-label": "Name of the conversation" });
    let isOpen = true;
    const done = (title) => {
      if (!isOpen) return; // drawing the list again takes the focus away, which ends here too
      isOpen = false;
      const hadFocus = document.activeElement === input;
      this.#actions.rename(id, title.trim() || name);
      if (hadFocus) this.#list.querySelector(`[data-id="${id}"]`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // or it presses the button that gets the focus
      done(event.key === "Enter" ? input.value : name);
    });
    input.addEventListener("blur", () => done(input.value));
    return input;
  }

  #onKey(event) {
    const item = event.target.closest("li");
    const step = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[event.key];
    if (step && !event.altKey) {
      event.preventDefault();
      item[step]?.querySelector(".open")?.focus();
    } else if (event.key === "Delete") item.querySelector(".remove").focus();
  }
}

const hasWords = ({ title, messages }, words) =>
  [title, ...messages.map(({ content }) => content)].some((text) => text.toLowerCase().includes(words));
