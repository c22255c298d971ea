// A message on the page: what the reader wrote, and one answer. An answer's `update` is called as
// often as it grows and touches only what is new; the answer itself (answer.js) may come from a
// stream or from storage. `chat` is what acts: edit, remove, turn, regenerate, continueAnswer.

import { describe, formatMs } from "./answer.js";
import { button, copyButton, el, indented, onSubmit, sureButton } from "./dom.js";
import { MarkdownStream } from "./markdown.js";
import { TokensView } from "./tokens_view.js";

export function userMessage(message, chat) {
  const text = el("div", { class: "plain" }, message.content);
  const edit = button("Edit", open, { class: "quiet edit idle", title: "Alt+E edits the last one" });
  const footer = el("footer", {}, el("span", { class: "actions" }, pager(message, chat), edit,
    copyButton(() => message.content), sureButton("Delete", () => chat.remove(message))));
  const node = el("article", { class: "message user", "aria-label": "You" }, text, footer);

  function open() {
    node.replaceChildren(editor(message.content, (changed) => chat.edit(message, changed), close));
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
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (event.target !== area || !isSend(event)) return;
    else save(area.value);
    event.preventDefault();
    event.stopPropagation();
  });
  return form;
}

/** Enter sends; with Shift, or while a letter is composed, it does not. */
export const isSend = ({ key, shiftKey, isComposing }) => key === "Enter" && !shiftKey && !isComposing;

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
  #reasoning = null; // {title, text}
  #tools = el("div");
  #toolNodes = []; // {name, body, length}
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
      this.#text, this.#tokens.node, this.#tools, this.#error,
      el("footer", {}, this.#stats, this.#actions));
  }

  /** Shows what the answer has got since the last call. */
  update() {
    const { answer } = this;
    if (answer.reasoning.length > this.#shown.reasoning) this.#updateReasoning();
    this.#markdown.append(answer.content.slice(this.#shown.content));
    this.#shown.content = answer.content.length;
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
    if (this.#reasoning) this.#reasoning.title.textContent = thought(answer);
    this.#error.hidden = !answer.error;
    this.#error.textContent = answer.error ?? "";
    const action = (name, keys, act) =>
      button(name, act, { class: `quiet idle ${name.toLowerCase()}`, title: `${name} (${keys})` });
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

  #updateReasoning() {
    const { reasoning } = this.answer;
    this.#reasoning ??= this.#openReasoning();
    this.#reasoning.title.textContent = thought(this.answer);
    this.#reasoning.text.append(reasoning.slice(this.#shown.reasoning)); // side by side: no text is ever copied
    this.#shown.reasoning = reasoning.length;
  }

  #openReasoning() {
    const title = el("summary");
    const text = el("div", { class: "plain" });
    this.node.prepend(el("details", { class: "fold reasoning" }, title, text));
    return { title, text };
  }

  #updateTool(call, index) {
    const nodes = (this.#toolNodes[index] ??= this.#openTool());
    if (nodes.length === call.arguments.length && nodes.name.textContent === call.name) return;
    nodes.name.textContent = call.name;
    nodes.body.textContent = indented(call.arguments, 2);
    nodes.length = call.arguments.length;
  }

  #openTool() {
    const name = el("code");
    const body = el("pre", { tabindex: "0" });
    this.#tools.append(el("details", { class: "fold tool" }, el("summary", {}, "Calls ", name), body));
    return { name, body, length: -1 };
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
