// The conversation on screen and the answers being written, which go on while another is shown.

import { request } from "./api.js";
import { applyChunk, describe, fail, newAnswer } from "./answer.js";
import { AnswerView, userMessage } from "./answer_view.js";
import { byId, oncePerFrame } from "./dom.js";
import { requestFields } from "./settings.js";
import { eventBatches } from "./sse.js";
import { saveConversation } from "./store.js";

const SAVE_EVERY_MS = 1000; // while an answer grows
const NEAR_END_PX = 48; // so close to the end, the view follows the text

export class Chat {
  conversation = null;

  #runs = new Map(); // conversation id -> {controller, answer, conversation}
  #views = [];
  #follows = true;
  #leaving = false; // a reload breaks connections before it says so
  #changed;
  #model;
  #scroller = byId("scroller");
  #messages = byId("messages");
  #drawSoon = oncePerFrame(() => this.#draw());

  /** `changed(conversation)`: titles or states to show elsewhere; `model()`: what to ask. */
  constructor(changed, model) {
    this.#changed = changed;
    this.#model = model;
    this.#scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    byId("to-end").addEventListener("click", () => this.#toEnd());
    new ResizeObserver(() => this.#follow()).observe(this.#scroller);
    addEventListener("beforeunload", () => (this.#leaving = true));
    addEventListener("pagehide", () => this.#runs.forEach((run) => save(run.conversation)));
  }

  get busy() {
    return this.#runs.has(this.conversation?.id);
  }

  isBusy(id) {
    return this.#runs.has(id);
  }

  show(conversation) {
    this.conversation = this.#runs.get(conversation.id)?.conversation ?? conversation;
    this.#messages.replaceChildren();
    this.#views = [];
    for (const message of this.conversation.messages) this.#add(message);
    this.#draw();
    this.#toEnd();
  }

  send(text) {
    const { conversation } = this;
    if (this.busy || !text.trim()) return;
    conversation.title ||= text.trim().split("\n")[0].slice(0, 60);
    const message = { role: "user", content: text };
    conversation.messages.push(message);
    this.#add(message);
    this.#answer();
  }

  regenerate() {
    const { messages } = this.conversation;
    if (this.busy || messages[messages.length - 1]?.role !== "assistant") return;
    messages.pop();
    this.#views.pop();
    this.#messages.lastChild.remove();
    this.#answer();
  }

  stop() {
    this.#runs.get(this.conversation.id)?.controller.abort();
  }

  forget(id) {
    this.#runs.get(id)?.controller.abort();
    this.#runs.delete(id);
  }

  #add(message) {
    if (message.role === "user") return this.#messages.append(userMessage(message.content));
    message.finish ??= this.busy ? null : "stopped"; // the page was closed while it was written
    const view = new AnswerView(message, () => this.regenerate());
    this.#views.push(view);
    this.#messages.append(view.node);
  }

  async #answer() {
    const { conversation } = this;
    const answer = newAnswer(performance.now());
    const run = { controller: new AbortController(), answer, conversation };
    this.#runs.set(conversation.id, run);
    this.#leaving = false; // it was called off
    const history = messagesFor(conversation);
    conversation.messages.push(answer);
    conversation.updated = Date.now();
    this.#add(answer);
    this.#toEnd();
    this.#note(conversation);
    await this.#stream(run, history);
    if (this.#runs.get(conversation.id) !== run) return; // deleted meanwhile
    this.#runs.delete(conversation.id);
    this.#drawSoon();
    this.#note(conversation);
    byId("status").textContent = answer.error ?? `Answer complete. ${describe(answer)}`;
  }

  async #stream(run, history) {
    const { answer, controller, conversation } = run;
    try {
      const response = await request("v1/chat/completions", {
        body: body(history, this.#model()), signal: controller.signal,
      });
      let saved = performance.now();
      for await (const events of eventBatches(response)) {
        const now = performance.now();
        for (const event of events) {
          if (event !== "[DONE]") applyChunk(answer, JSON.parse(event), now);
        }
        this.#drawSoon();
        if (now - saved > SAVE_EVERY_MS) {
          saved = now;
          save(conversation);
        }
      }
      if (!answer.finish) fail(answer, "The connection ended before the answer did.");
    } catch (error) {
      if (controller.signal.aborted || this.#leaving) answer.finish = "stopped";
      else fail(answer, error.message);
    }
  }

  #note(conversation) {
    const notice = byId("notice");
    notice.hidden = save(conversation);
    notice.textContent = "This browser's storage is full: the conversation is not kept.";
    this.#changed(conversation);
  }

  // --- drawing and scrolling ---

  #draw() {
    for (const view of this.#views) if (!view.isDone) view.update();
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

const save = saveConversation;

function body(messages, model) {
  return {
    model,
    messages,
    stream: true,
    // Usage in each chunk: a stopped answer is counted in tokens too.
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...requestFields(),
  };
}

/** What the model is told: an answer that failed before its first word is left out. */
function messagesFor({ system, messages }) {
  const told = messages.filter(({ role, content, toolCalls }) => role === "user" || content || toolCalls?.length);
  return [...(system ? [{ role: "system", content: system }] : []), ...told.map(wireMessage)];
}

function wireMessage({ role, content, toolCalls }) {
  if (!toolCalls?.length) return { role, content };
  const calls = toolCalls.map(({ id, name, arguments: text }) =>
    ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content, tool_calls: calls };
}
