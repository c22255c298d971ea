// The conversation on screen and the answers being written, which go on while another is shown.

import { eventBatches, request } from "./api.js";
import { applyChunk, describe, fail, newAnswer, reopen } from "./answer.js";
import { drawGauge, onDrop } from "./context_gauge.js";
import { branch, dropOldest, messagesFor, numChars, numToDrop, removeMessage, turnTo } from "./conversation.js";
import { button, byId, el, oncePerFrame } from "./dom.js";
import { AnswerView, userMessage } from "./messages.js";
import { requestFields } from "./settings.js";
import { saveConversation } from "./store.js";

const SAVE_EVERY_MS = 1000; // while an answer grows
const NEAR_END_PX = 48; // so close to the end, the view follows the text

export class Chat {
  conversation = null;

  #runs = new Map(); // conversation id -> {controller, conversation}
  #views = [];
  #follows = true;
  #leaving = false; // a reload breaks connections before it says so
  #changed;
  #model;
  #scroller = byId("scroller");
  #messages = byId("messages");
  #drawSoon = oncePerFrame(() => this.#draw());

  /** `changed()`: titles or states to show elsewhere; `model()`: {id, max_model_len}. */
  constructor(changed, model) {
    this.#changed = changed;
    this.#model = model;
    this.#scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    byId("to-end").onclick = () => this.#toEnd();
    onDrop(() => this.#drop());
    new ResizeObserver(() => this.#follow()).observe(this.#scroller);
    addEventListener("beforeunload", () => (this.#leaving = true));
    addEventListener("pagehide", () => this.#runs.forEach((run) => saveConversation(run.conversation)));
  }

  isBusy(id = this.conversation.id) {
    return this.#runs.has(id);
  }

  show(conversation) {
    this.conversation = this.#runs.get(conversation.id)?.conversation ?? conversation;
    this.#redraw();
    this.#toEnd();
  }

  /** `text` is asked next, or in the place of `message`: what followed stays to be turned back to. */
  send(text, message) {
    if (this.isBusy() || !text.trim()) return;
    const branches = message && this.#branch(message);
    const question = { role: "user", content: text, branches };
    this.conversation.title ||= text.trim().split("\n")[0].slice(0, 60);
    this.conversation.messages.push(question);
    this.#add(question);
    this.#answer(newAnswer(performance.now()));
  }

  /** Another answer in the place of `answer`. */
  regenerate(answer) {
    if (this.isBusy()) return;
    this.#answer({ ...newAnswer(performance.now()), branches: this.#branch(answer) });
  }

  /** The last answer goes on where it stopped. */
  continueAnswer() {
    const answer = this.conversation.messages.at(-1);
    if (this.isBusy() || !answer?.content) return;
    reopen(answer, performance.now());
    this.conversation.messages.pop();
    this.#redraw();
    this.#answer(answer);
  }

  remove(message) {
    this.#change(removeMessage, message);
  }

  turn(message, by) {
    this.#change(turnTo, message, by);
  }

  /** The oldest turns are not sent any more, so that the rest has room. */
  #drop() {
    const count = numToDrop(this.conversation, this.#model().max_model_len);
    if (count === null) return;
    this.#change(dropOldest, count);
    this.#toEnd();
    const last = this.conversation.messages.at(-1);
    if (last.error && !last.content) this.regenerate(last);
  }

  stop() {
    this.#runs.get(this.conversation.id)?.controller.abort();
  }

  forget(id) {
    this.#runs.get(id)?.controller.abort();
    this.#runs.delete(id);
  }

  /** Takes `message` and what follows away, and returns them as branches of what comes next. */
  #branch(message) {
    const branches = branch(this.conversation, message);
    this.#redraw();
    return branches;
  }

  #change(action, ...values) {
    if (this.isBusy()) return;
    action(this.conversation, ...values);
    this.#redraw();
    this.#note(this.conversation);
  }

  async #answer(answer) {
    const { conversation } = this;
    const run = { controller: new AbortController(), conversation };
    this.#runs.set(conversation.id, run);
    this.#leaving = false; // it was called off
    const history = messagesFor(conversation);
    answer.promptChars = numChars(history);
    if (answer.content) history.push({ role: "assistant", content: answer.content });
    conversation.messages.push(answer);
    conversation.updated = Date.now();
    this.#add(answer);
    this.#toEnd();
    this.#note(conversation);
    await this.#stream(run, answer, history);
    if (this.#runs.get(conversation.id) !== run) return; // deleted meanwhile
    this.#runs.delete(conversation.id);
    this.#drawSoon();
    this.#note(conversation);
    byId("status").textContent = answer.error ?? `Answer complete. ${describe(answer)}`;
  }

  async #stream({ controller: { signal }, conversation }, answer, history) {
    let saved = performance.now();
    try {
      const response = await request("v1/chat/completions", { body: bodyOf(history, this.#model().id), signal });
      for await (const events of eventBatches(response)) {
        const now = performance.now();
        for (const event of events) if (event !== "[DONE]") applyChunk(answer, JSON.parse(event), now);
        this.#drawSoon();
        if (now - saved <= SAVE_EVERY_MS) continue;
        saved = now;
        saveConversation(conversation);
      }
      if (!answer.finish) fail(answer, "The connection ended before the answer did.");
    } catch (error) {
      if (signal.aborted || this.#leaving) answer.finish = "stopped";
      else fail(answer, error.message);
    }
  }

  #note(conversation) {
    const notice = byId("notice");
    notice.hidden = saveConversation(conversation);
    notice.textContent = "This browser's storage is full: the conversation is not kept.";
    this.#changed();
  }

  #redraw() {
    const { messages, numDropped = 0 } = this.conversation;
    this.#messages.replaceChildren();
    this.#views = [];
    const again = button("Send them again", () => this.#change(dropOldest, 0));
    const divider = el("p", { class: "divider" }, `${numDropped} messages above are not sent.`, again);
    messages.forEach((message) => this.#add(message));
    if (numDropped) this.#messages.children[numDropped]?.before(divider);
    this.#draw();
  }

  #add(message) {
    if (message.role === "user") return this.#messages.append(userMessage(message, this));
    message.finish ??= this.isBusy() ? null : "stopped"; // the page was closed while it was written
    const view = new AnswerView(message, this);
    this.#views.push(view);
    this.#messages.append(view.node);
  }

  #draw() {
    for (const view of this.#views) if (!view.isDone) view.update();
    drawGauge(this.conversation, this.#model().max_model_len);
    this.#follow();
  }

  #follow() {
    if (this.#follows) this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  #toEnd() {
    this.#follows = true;
    this.#follow();
    byId("to-end").hidden = true;
  }

  #noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    this.#follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    byId("to-end").hidden = this.#follows;
  }
}

function bodyOf(messages, model) {
  const goesOn = messages.at(-1)?.role === "assistant" && { continue_final_message: true, add_generation_prompt: false };
  // Usage in each chunk: a stopped answer is counted in tokens too.
  const usage = { include_usage: true, continuous_usage_stats: true };
  return { model, messages, stream: true, stream_options: usage, ...goesOn, ...requestFields() };
}
