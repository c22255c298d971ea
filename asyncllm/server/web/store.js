// Conversations and settings in this browser. One localStorage key per conversation, so that two
// tabs do not overwrite each other's; per-token probabilities are not kept, they would fill it.

import { newAnswer } from "./answer.js";
import { newConversation } from "./conversation.js";
import { parse } from "./dom.js";

const PREFIX = "asyncllm.chat.";
const SETTINGS = "asyncllm.settings";
const EXPORT = "asyncllm conversations";
const TEXTS = ["finish", "error"]; // of an answer, null until they are known; its other nulls are numbers

/** The newest first. What cannot be read (another version's, damaged) is left out. */
export function loadConversations() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  return ids.map(loadConversation).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

export function loadConversation(id) {
  const found = parse(localStorage.getItem(PREFIX + id));
  return isConversation(found) ? found : null;
}

/** False when the browser has no room for it. */
export const saveConversation = (conversation) => put(PREFIX + conversation.id, conversation);
export const deleteConversation = (id) => localStorage.removeItem(PREFIX + id);

export const loadSettings = () => parse(localStorage.getItem(SETTINGS)) ?? {};
export const saveSettings = (settings) => put(SETTINGS, settings);

/** All of them as the text of one file. */
export const exported = (conversations) => toJson({ format: EXPORT, version: 1, conversations });

/** The conversations of such a file, as new ones. Throws for what is none. */
export function imported(text) {
  const file = parse(text);
  if (file?.format !== EXPORT || !file.conversations?.every(isConversation)) {
    throw new TypeError("this is no file that the page exported");
  }
  return file.conversations.map(({ messages, ...given }) => {
    const fresh = newConversation();
    return { ...likeIn(fresh, { ...given, numDropped: 0 }), id: fresh.id, messages: messages.map(cleanMessage) };
  });
}

/** Only known fields of the right kind, from a file that anybody may have written. */
function cleanMessage(message) {
  if (message.role === "user") return likeIn({ role: "user", content: "" }, message);
  const { tokens, ...clean } = likeIn(newAnswer(0), message);
  return { ...clean, toolCalls: clean.toolCalls.map((call) => likeIn({ id: "", name: "", arguments: "" }, call ?? {})) };
}

/** `example` with those values of `given` that are of the same kind. */
function likeIn(example, given) {
  const entries = Object.entries(example).map(([name, value]) => {
    const kind = value === null ? (TEXTS.includes(name) ? "string" : "number") : typeof value;
    const isLike = typeof given[name] === kind && Array.isArray(given[name]) === Array.isArray(value);
    return [name, isLike ? given[name] : value];
  });
  return Object.fromEntries(entries);
}

/** Calls `changed(id)` when another tab wrote or deleted a conversation. */
export function onOtherTab(changed) {
  addEventListener("storage", ({ key }) => key?.startsWith(PREFIX) && changed(key.slice(PREFIX.length)));
}

const toJson = (value) => JSON.stringify(value, (name, kept) => (name === "tokens" ? undefined : kept));

const isConversation = (value) =>
  typeof value?.id === "string" && Array.isArray(value.messages) && value.messages.every(isMessage);

const isMessage = (value) => ["user", "assistant"].includes(value?.role) && typeof value.content === "string";

function put(key, value) {
  try {
    localStorage.setItem(key, toJson(value));
    return true;
  } catch (error) {
    if (error.name === "QuotaExceededError") return false;
    throw error;
  }
}
