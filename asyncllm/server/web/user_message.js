// What the reader wrote: shown, edited, deleted.

import { copyButton, el, pager, sureButton } from "./dom.js";

/** `actions`: {edit(message, text), remove(message), turn(message, by)} */
export function userMessage(message, actions) {
  const text = el("div", { class: "plain" }, message.content);
  const edit = el("button", { type: "button", class: "quiet edit idle", title: "Alt+E edits the last one" }, "Edit");
  const footer = el("footer", {}, el("span", { class: "actions" }, pager(message, actions), edit,
    copyButton(() => message.content), sureButton("Delete", () => actions.remove(message))));
  const node = el("article", { class: "message user", "aria-label": "You" }, text, footer);
  edit.addEventListener("click", () => {
    const show = () => {
      node.replaceChildren(text, footer);
      edit.focus();
    };
    node.replaceChildren(editor(message, actions, show));
    node.querySelector("textarea").focus();
  });
  return node;
}

function editor(message, actions, cancel) {
  const area = el("textarea", { "aria-label": "Edit the message", rows: Math.min(12, message.content.split("\n").length + 1) });
  area.value = message.content;
  const form = el("form", { class: "editor" }, area,
    el("div", { class: "buttons" },
      el("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
      el("button", { type: "submit", class: "primary" }, "Send")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    actions.edit(message, area.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape") cancel();
    else return;
    event.stopPropagation();
  });
  return form;
}
