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

/** Takes `message` and what follows away: [they, without their branches; {before, after}]. */
function take(conversation, message) {
  const at = conversation.messages.indexOf(message);
  const [{ branches: { before = [], after = [] } = {}, ...first }, ...rest] = conversation.messages.splice(at);
  conversation.numDropped = Math.min(conversation.numDropped ?? 0, at);
  return [[first, ...rest], { before, after }];
}

/**
 * Takes `message` and what follows away; what is put there next has them as a branch. An answer that
 * failed before its first word is not worth one.
 */
export function branch(conversation, message) {
  const [tail, { before, after }] = take(conversation, message);
  return { before: [...before, tail, ...after].filter(([first]) => isTold(first)), after: [] };
}

/** Shows the branch before (`by` -1) or after (1) the one that `message` begins, where there is one. */
export function turnTo(conversation, message, by) {
  const [tail, { before, after }] = take(conversation, message);
  const all = [...before, tail, ...after];
  const next = Math.min(all.length - 1, Math.max(0, before.length + by));
  const branches = { before: all.slice(0, next), after: all.slice(next + 1) };
  const [first, ...rest] = all[next];
  conversation.messages.push({ ...first, branches }, ...rest);
}

/** A question goes with its answer; an answer goes alone. */
export function removeMessage(conversation, message) {
  const { messages } = conversation;
  const at = messages.indexOf(message);
  const isTurn = message.role === "user" && messages[at + 1]?.role === "assistant";
  const { length } = messages.splice(at, isTurn ? 2 : 1);
  if (at < conversation.numDropped) conversation.numDropped -= length;
}

export const dropOldest = (conversation, count) => (conversation.numDropped = count);

const isTold = ({ role, content, toolCalls }) => role === "user" || content || toolCalls?.length;

/** An answer that failed before its first word is left out. */
export function messagesFor({ system, messages, numDropped = 0 }) {
  const told = messages.slice(numDropped).filter(isTold).map(wireMessage);
  return system ? [{ role: "system", content: system }, ...told] : told;
}

function wireMessage({ role, content, toolCalls }) {
  if (!toolCalls?.length) return { role, content };
  const calls = toolCalls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
  return { role, content, tool_calls: calls };
}

export const numChars = (messages) => messages.reduce((sum, { content }) => sum + content.length, 0);

/** Tokens that the messages take: as the server counted them, or a guess from its last count. */
export function contextUsed(conversation) {
  const counted = conversation.messages.findLast(({ promptTokens }) => promptTokens > 0);
  const now = numChars(messagesFor(conversation));
  if (!counted) return Math.round(now / CHARS_PER_TOKEN);
  const { promptTokens, promptChars, numTokens, content } = counted;
  const [perChar, since] = [promptTokens / Math.max(1, promptChars), now - promptChars - content.length];
  return Math.round(since < 0 ? now * perChar : promptTokens + numTokens + since * perChar);
}

/** How many messages to leave out so that about half of the context is free; null for no more. */
export function numToDrop(conversation, maxTokens) {
  const { messages, numDropped = 0 } = conversation;
  const starts = messages.flatMap(({ role }, i) => (role === "user" && i > numDropped ? [i] : []));
  const perChar = contextUsed(conversation) / Math.max(1, numChars(messagesFor(conversation)));
  const fits = (start) => numChars(messages.slice(start)) * perChar <= maxTokens * KEPT_SHARE;
  return starts.find(fits) ?? starts.at(-1) ?? null;
}
