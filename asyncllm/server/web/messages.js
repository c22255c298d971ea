// A message on the page: what the reader wrote, and one answer. An answer's `update` is called as
// often as it grows and touches only what is new; the answer itself (answer.js) may come from a
// stream or from storage. `chat` is what acts: send, remove, turn, regenerate, continueAnswer.

import { describe, formatMs } from "./answer.js";
import { button, copyButton, el, enterSends, indented, onSubmit, sureButton } from "./dom.js";
import { MarkdownStream } from "./markdown.js";
import { TokensView } from "./tokens_view.js";

export function userMessage(message, chat) {
  const text = el("div", { class: "plain" }, message.content);
  const edit = button("Edit", open, { class: "quiet edit idle", title: "Alt+E edits the last one", "aria-keyshortcuts": "Alt+E" });
  const footer = el("footer", {}, el("span", { class: "actions" }, pager(message, chat), edit,
    copyButton(() => message.content), sureButton("Delete", () => chat.remove(message))));
  const node = el("article", { class: "message user", "aria-label": "You" }, text, footer);

  function open() {
    node.replaceChildren(editor(message.content, (changed) => chat.send(changed, message), close));
    node.querySelector("textarea").focus();
  }
  function close() {
    node.replaceChildren(text, footer);
    edit.focus();
  }
  return node;
}

function editor(text, save, cancel) {
  const rows = Math.min(12, text.split("\n").length + 1);
  const area = el("textarea", { "aria-label": "Edit the message", rows });
  area.value = text;
  const form = el("form", { class: "editor" }, area,
    el("div", { class: "buttons" }, button("Cancel", cancel), el("button", { type: "submit", class: "primary" }, "Send")));
  onSubmit(form, () => save(area.value));
  enterSends(area);
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation(); // elsewhere it stops an answer
    cancel();
  });
  return form;
}

/** Turns between the answers, or the questions, that were at one place; null where there was one. */
function pager(message, chat) {
  const { before = [], after = [] } = message.branches ?? {};
  if (!before.length && !after.length) return null;
  const turn = (by, name, sign, { length }) =>
    button(sign, () => chat.turn(message, by), { class: "quiet idle", "aria-label": name, disabled: !length });
  return el("span", { class: "pager" },
    turn(-1, "The one before", "‹", before),
    `${before.length + 1} / ${before.length + 1 + after.length}`,
    turn(1, "The one after", "›", after));
}

export class AnswerView {
  #shown = { content: 0, reasoning: 0 };
  #text = el("div", { class: "markdown" });
  #markdown = new MarkdownStream(this.#text);
  #thought = el("summary");
  #reasoning = el("div", { class: "thoughts" });
  #fold = el("details", { class: "fold reasoning", hidden: true }, this.#thought, this.#reasoning);
  #tools = el("div");
  #tokens = new TokensView();
  #error = el("p", { class: "error", role: "alert", hidden: true });
  #stats = el("span", { class: "stats" });
  #actions = el("span", { class: "actions" });
  #chat;

  isDone = false; // the answer is complete, and shown so

  constructor(answer, chat) {
    this.answer = answer;
    this.#chat = chat;
    this.node = el("article", { class: "message assistant waiting", "aria-label": "Answer" },
      this.#fold, this.#text, this.#tokens.node, this.#tools, this.#error,
      el("footer", {}, this.#stats, this.#actions));
  }

  /** Shows what the answer has got since the last call. */
  update() {
    const { answer } = this;
    this.#markdown.append(answer.content.slice(this.#shown.content));
    this.#shown.content = answer.content.length;
    if (answer.reasoning) this.#updateReasoning(answer.reasoning);
    answer.toolCalls.forEach((call, i) => this.#updateTool(call, i));
    this.#tokens.update(answer.tokens ?? []);
    this.#stats.textContent = describe(answer);
    this.node.classList.toggle("waiting", !answer.finish);
    if (answer.finish && !this.isDone) this.#finish();
  }

  #finish() {
    const { answer } = this;
    this.isDone = true;
    this.#markdown.finish();
    this.#error.hidden = !answer.error;
    this.#error.textContent = answer.error ?? "";
    const action = (name, keys, act) =>
      button(name, act, { class: `quiet idle ${name.toLowerCase()}`, title: `${name} (${keys})`, "aria-keyshortcuts": keys });
    const canGoOn = answer.finish !== "stop" && answer.content && !answer.toolCalls?.length;
    this.#actions.append(...[
      pager(answer, this.#chat),
      answer.tokens?.length && this.#tokensButton(),
      answer.content && copyButton(() => answer.content),
      canGoOn && action("Continue", "Alt+C", () => this.#chat.continueAnswer()), // the last one's only, by CSS
      action("Regenerate", "Alt+R", () => this.#chat.regenerate(answer)),
      sureButton("Delete", () => this.#chat.remove(answer)),
    ].filter(Boolean));
  }

  #updateReasoning(text) {
    this.#fold.hidden = false;
    this.#thought.textContent = thought(this.answer);
    this.#reasoning.append(text.slice(this.#shown.reasoning)); // side by side: no text is ever copied
    this.#shown.reasoning = text.length;
  }

  #updateTool({ name, arguments: text }, index) {
    const length = String(name.length + text.length); // they only ever grow
    const shown = this.#tools.children[index];
    if (shown?.dataset.length === length) return;
    const body = [el("summary", {}, "Calls ", el("code", {}, name)), el("pre", { tabindex: "0" }, indented(text, 2))];
    if (shown) shown.replaceChildren(...body);
    else this.#tools.append(el("details", { class: "fold tool" }, ...body));
    this.#tools.children[index].dataset.length = length;
  }

  #tokensButton() {
    const toggle = button("Tokens", () => {
      this.#text.hidden = this.#tokens.node.hidden;
      this.#tokens.node.hidden = !this.#text.hidden;
      toggle.setAttribute("aria-pressed", String(this.#text.hidden));
    }, { "aria-pressed": "false" });
    return toggle;
  }
}

function thought(answer) {
  if (answer.reasonedMs != null) return `Thought for ${formatMs(answer.reasonedMs - answer.firstMs)}`;
  return answer.finish ? "Thought" : "Thinking…";
}
