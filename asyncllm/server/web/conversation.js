// What a conversation is and how its turns change. No DOM: chat.js shows it, store.js keeps it.
//
// {id, title, updated, system, messages, numDropped}: the first `numDropped` messages are shown and
// not sent. A message may have `branches: {before, after}`: lists of messages that were at its place
// and after it, before an edit or another answer.

const CHARS_PER_TOKEN = 4; // a guess, until an answer has told better
const KEPT_SHARE = 0.5; // of the context, when the oldest turns are dropped

export function newConversation() {
  const id = crypto.getRandomValues(new Uint32Array(3)).join("-"); // randomUUID wants https
  return { id, title: "", updated: Date.now(), system: "", messages: [], numDropped: 0 };
}

// --- branches ---

/**
 * Takes the messages from `at` on away; what is put there next has them as a branch. An answer that
 * failed before its first word is not worth one.
 */
export function branch(conversation, at) {
  const tail = conversation.messages.splice(at);
  const { before, after } = takeBranches(tail);
  conversation.numDropped = Math.min(conversation.numDropped ?? 0, at);
  return { before: [...before, tail, ...after].filter(([first]) => isTold(first)), after: [] };
}

/** Shows the branch before (`by` -1) or after (1) the one at `at`; false where there is none. */
export function turnTo(conversation, at, by) {
  const { before = [], after = [] } = conversation.messages[at]?.branches ?? {};
  if (!(by < 0 ? before : after).length) return false;
  const tail = conversation.messages.splice(at);
  takeBranches(tail);
  const next = by < 0 ? before.at(-1) : after[0];
  const branches = by < 0
    ? { before: before.slice(0, -1), after: [tail, ...after] }
    : { before: [...before, tail], after: after.slice(1) };
  conversation.messages.push({ ...next[0], branches }, ...next.slice(1));
  conversation.numDropped = Math.min(conversation.numDropped ?? 0, at);
  return true;
}

function takeBranches(tail) {
  const { branches = { before: [], after: [] } } = tail[0];
  delete tail[0].branches;
  return branches;
}

/** A question goes with its answer; an answer goes alone. */
export function removeMessage(conversation, at) {
  const { messages } = conversation;
  const isTurn = messages[at].role === "user" && messages[at + 1]?.role === "assistant";
  const count = isTurn ? 2 : 1;
  messages.splice(at, count);
  if (at < conversation.numDropped) conversation.numDropped -= count;
}

// --- what the model is told, and how much of the context that takes ---

const isTold = ({ role, content, toolCalls }) => role === "user" || content || toolCalls?.length;

/** An answer that failed before its first word is left out. */
export function messagesFor({ system, messages, numDropped = 0 }) {
  const told = messages.slice(numDropped).filter(isTold);
  return [...(system ? [{ role: "system", content: system }] : []), ...told.map(wireMessage)];
}

function wireMessage({ role, content, toolCalls }) {
  if (!toolCalls?.length) return { role, content };
  const calls = toolCalls.map(({ id, name, arguments: text }) =>
    ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content, tool_calls: calls };
}

export const numChars = (messages) => messages.reduce((sum, { content }) => sum + content.length, 0);

/** Tokens that the messages take: as the server counted them, or a guess from its last count. */
export function contextUsed(conversation) {
  const { messages } = conversation;
  const at = messages.findLastIndex(({ promptTokens }) => promptTokens > 0);
  const now = numChars(messagesFor(conversation));
  if (at === -1) return Math.round(now / CHARS_PER_TOKEN);
  const { promptTokens, promptChars, numTokens, content } = messages[at];
  if (now === promptChars + content.length) return promptTokens + numTokens;
  return Math.round((now * promptTokens) / Math.max(1, promptChars));
}

/** How many messages to leave out so that about half of the context is free; null for no more. */
export function numToDrop(conversation, maxTokens) {
  const { messages, numDropped = 0 } = conversation;
  const starts = messages.flatMap(({ role }, i) => (role === "user" && i > numDropped ? [i] : []));
  const perChar = contextUsed(conversation) / Math.max(1, numChars(messagesFor(conversation)));
  const fits = (start) => numChars(messages.slice(start)) * perChar <= maxTokens * KEPT_SHARE;
  return starts.find(fits) ?? starts.at(-1) ?? null;
}
