// What one answer is, and how the chunks of a stream build it. No DOM: the view reads it.

/** `now` in ms of one clock; only differences are kept. */
export function newAnswer(now) {
  return {
    role: "assistant",
    content: "",
    reasoning: "",
    toolCalls: [], // {id, name, arguments}
    tokens: [], // {text, logprob, top: [{text, logprob}]}, with logprobs only
    promptTokens: null,
    promptChars: 0, // of the messages that were sent
    numTokens: 0,
    earlierTokens: 0, // from before it was continued
    firstTokens: 0, // tokens that the first chunk with any brought
    startedMs: now,
    firstMs: null, // since startedMs
    reasonedMs: null, // when the text began, where reasoning came first
    lastMs: null,
    finish: null, // the server's finish_reason, "stopped" by the reader, or "error"
    error: null,
  };
}

/** An answer that ended goes on: its times are those of the new part. */
export function reopen(answer, now) {
  const { firstMs, lastMs, firstTokens, finish, error } = newAnswer(now);
  answer.tokens ??= []; // not kept in storage
  Object.assign(answer, { startedMs: now, earlierTokens: answer.numTokens, firstMs, lastMs, firstTokens, finish, error });
}

/** Applies one `chat.completion.chunk`, or an error event. */
export function applyChunk(answer, chunk, now) {
  if (chunk.error) return fail(answer, chunk.error.message ?? "the server reported an error");
  const choice = chunk.choices?.[0];
  if (choice) applyChoice(answer, choice, now);
  if (chunk.usage) {
    const { earlierTokens = 0 } = answer;
    answer.promptTokens = (chunk.usage.prompt_tokens ?? 0) - earlierTokens || null;
    answer.numTokens = earlierTokens + (chunk.usage.completion_tokens ?? answer.numTokens - earlierTokens);
    if (answer.firstMs !== null && !answer.firstTokens) answer.firstTokens = answer.numTokens;
  }
}

export function fail(answer, message) {
  answer.finish = "error";
  answer.error = message;
}

function applyChoice(answer, choice, now) {
  const delta = choice.delta ?? {};
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  const content = delta.content ?? "";
  const since = now - answer.startedMs;
  if (content && answer.reasoning && answer.reasonedMs === null) answer.reasonedMs = since;
  answer.reasoning += reasoning;
  answer.content += content;
  for (const call of delta.tool_calls ?? []) applyToolCall(answer, call);
  if (content || reasoning || delta.tool_calls?.length) {
    answer.firstMs ??= since;
    answer.lastMs = since;
  }
  for (const token of choice.logprobs?.content ?? []) answer.tokens.push(namedToken(token));
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function applyToolCall(answer, delta) {
  const index = Number.isInteger(delta.index) && delta.index >= 0 ? delta.index : 0;
  if (index > answer.toolCalls.length) return; // a call that was never begun
  const call = (answer.toolCalls[index] ??= { id: "", name: "", arguments: "" });
  call.id ||= delta.id ?? "";
  call.name += delta.function?.name ?? "";
  call.arguments += delta.function?.arguments ?? "";
}

const namedToken = ({ token, logprob, top_logprobs: top }) => ({
  text: token,
  logprob,
  top: (top ?? []).map((other) => ({ text: other.token, logprob: other.logprob })),
});

/** Tokens per second after the first chunk; null where there is no time between. */
export function tokensPerSecond(answer) {
  const ms = answer.lastMs - answer.firstMs;
  const tokens = answer.numTokens - answer.firstTokens;
  return ms > 0 && tokens > 0 ? (tokens / ms) * 1000 : null;
}

/** One line: tokens, time to the first one, rate, and why it ended where that is news. */
export function describe(answer) {
  const parts = [];
  if (answer.numTokens) parts.push(`${answer.numTokens} token${answer.numTokens === 1 ? "" : "s"}`);
  if (answer.firstMs !== null) parts.push(`${formatMs(answer.firstMs)} to first`);
  const rate = tokensPerSecond(answer);
  if (rate !== null) parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
  if (answer.finish === "length") parts.push("cut off at the token limit");
  if (answer.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

export function formatMs(ms) {
  if (ms < 1) return "< 1 ms";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`;
}
