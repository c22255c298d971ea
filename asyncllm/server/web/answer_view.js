// One answer on the page. `update` is called as often as the answer grows and touches only what is
// new; the answer itself (answer.js) may come from a stream or from storage.

import { describe, formatMs } from "./answer.js";
import { copyButton, el, pager, sureButton } from "./dom.js";
import { MarkdownStream } from "./markdown.js";
import { TokensView } from "./tokens_view.js";

export class AnswerView {
  #shown = { content: 0, reasoning: 0 };
  #text = el("div", { class: "markdown" });
  #markdown = new MarkdownStream(this.#text);
  #reasoning = null; // {node, title, text}
  #tools = el("div");
  #toolNodes = []; // {name, body}
  #tokens = new TokensView();
  #error = el("p", { class: "error", role: "alert", hidden: true });
  #stats = el("span", { class: "stats" });
  #actions = el("span", { class: "actions" });

  isDone = false; // the answer is complete, and shown so

  #chat; // {regenerate(answer), continueAnswer(), remove(answer), turn(answer, by)}

  constructor(answer, chat) {
    this.answer = answer;
    this.#chat = chat;
    this.node = el("article", { class: "message assistant waiting", "aria-label": "Answer" },
      this.#text, this.#tokens.node, this.#tools, this.#error,
      el("footer", {}, this.#stats, this.#actions));
  }

  /** Shows what the answer has got since the last call. */
  update() {
    const answer = this.answer;
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
    this.isDone = true;
    this.#markdown.finish();
    const { answer } = this;
    if (this.#reasoning) this.#reasoning.title.textContent = thought(answer);
    this.#error.hidden = !answer.error;
    this.#error.textContent = answer.error ?? "";
    if (answer.tokens?.length) this.#actions.append(this.#tokensButton());
    if (answer.content) this.#actions.append(copyButton(() => answer.content));
    const button = (name, title, act) => el("button", { type: "button", class: `quiet idle ${name}`, title, onclick: act }, title.split(" (")[0]);
    // Only the last answer can go on (by CSS).
    if (canGoOn(answer)) this.#actions.append(button("continue", "Continue (Alt+C)", () => this.#chat.continueAnswer()));
    this.#actions.append(
      button("again", "Regenerate (Alt+R)", () => this.#chat.regenerate(answer)),
      sureButton("Delete", () => this.#chat.remove(answer)));
    const turns = pager(answer, this.#chat);
    if (turns) this.#actions.prepend(turns);
  }

  #updateReasoning() {
    const { answer } = this;
    this.#reasoning ??= this.#openReasoning();
    this.#reasoning.title.textContent = thought(answer);
    const text = answer.reasoning.slice(this.#shown.reasoning);
    this.#reasoning.text.append(text); // text nodes side by side: none is ever copied
    this.#shown.reasoning = answer.reasoning.length;
  }

  #openReasoning() {
    const title = el("summary");
    const text = el("div", { class: "plain" });
    this.node.prepend(el("details", { class: "fold reasoning" }, title, text));
    return { title, text };
  }

  #updateTool(call, index) {
    if (!this.#toolNodes[index]) {
      const name = el("code");
      const body = el("pre", { tabindex: "0" });
      this.#tools.append(el("details", { class: "fold tool" }, el("summary", {}, "Calls ", name), body));
      this.#toolNodes[index] = { name, body, length: -1 };
    }
    const nodes = this.#toolNodes[index];
    if (nodes.length === call.arguments.length && nodes.name.textContent === call.name) return;
    nodes.name.textContent = call.name;
    nodes.body.textContent = pretty(call.arguments);
    nodes.length = call.arguments.length;
  }

  #tokensButton() {
    const button = el("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Tokens");
    button.addEventListener("click", () => {
      const on = this.#tokens.node.hidden;
      this.#tokens.node.hidden = !on;
      this.#text.hidden = on;
      button.setAttribute("aria-pressed", String(on));
    });
    return button;
  }
}

const canGoOn = ({ finish, content, toolCalls }) => finish !== "stop" && content && !toolCalls?.length;

function thought(answer) {
  if (answer.reasonedMs != null) return `Thought for ${formatMs(answer.reasonedMs - answer.firstMs)}`;
  return answer.finish ? "Thought" : "Thinking…";
}

/** Arguments are JSON once they are complete; until then they are shown as they come. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
