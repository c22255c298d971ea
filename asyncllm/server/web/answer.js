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
  const { startedMs, firstMs, lastMs, firstTokens, finish, error } = newAnswer(now);
  answer.tokens ??= []; // not kept in storage
  Object.assign(answer, { startedMs, earlierTokens: answer.numTokens, firstMs, lastMs, firstTokens, finish, error });
}

/** Applies one `chat.completion.chunk`, or an error event. */
export function applyChunk(answer, { error, choices, usage }, now) {
  if (error) return fail(answer, error.message ?? "the server reported an error");
  if (choices?.[0]) applyChoice(answer, choices[0], now - answer.startedMs);
  if (!usage) return;
  const { earlierTokens = 0 } = answer;
  answer.promptTokens = (usage.prompt_tokens ?? 0) - earlierTokens || null;
  answer.numTokens = earlierTokens + (usage.completion_tokens ?? answer.numTokens - earlierTokens);
  if (answer.firstMs !== null && !answer.firstTokens) answer.firstTokens = answer.numTokens;
}

export function fail(answer, error) {
  Object.assign(answer, { finish: "error", error });
}

/** `since`: ms from the start of the answer. */
function applyChoice(answer, { delta, logprobs, finish_reason: finish }, since) {
  const { reasoning, reasoning_content: sameElsewhere, content, tool_calls: calls } = delta ?? {};
  const thought = reasoning ?? sameElsewhere ?? "";
  if (content && answer.reasoning) answer.reasonedMs ??= since;
  answer.reasoning += thought;
  answer.content += content ?? "";
  for (const call of calls ?? []) applyToolCall(answer, call);
  if (content || thought || calls?.length) {
    answer.firstMs ??= since;
    answer.lastMs = since;
  }
  for (const token of logprobs?.content ?? []) answer.tokens.push({ ...named(token), top: (token.top_logprobs ?? []).map(named) });
  if (finish) answer.finish = finish;
}

const named = ({ token, logprob }) => ({ text: token, logprob });

function applyToolCall({ toolCalls }, delta) {
  const index = Number.isInteger(delta.index) && delta.index >= 0 ? delta.index : 0;
  if (index > toolCalls.length) return; // a call that was never begun
  const call = (toolCalls[index] ??= { id: "", name: "", arguments: "" });
  call.id ||= delta.id ?? "";
  call.name += delta.function?.name ?? "";
  call.arguments += delta.function?.arguments ?? "";
}

const ENDS = { length: "cut off at the token limit", stopped: "stopped" };

/** One line: tokens, time to the first one, rate, and why it ended where that is news. */
export function describe({ numTokens, firstTokens, firstMs, lastMs, finish }) {
  const rate = (1000 * (numTokens - firstTokens)) / (lastMs - firstMs); // after the first chunk
  return [
    numTokens && `${numTokens} token${numTokens === 1 ? "" : "s"}`,
    firstMs !== null && `${formatMs(firstMs)} to first`,
    rate > 0 && rate < Infinity && `${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`,
    ENDS[finish],
  ].filter(Boolean).join(" · ");
}

export function formatMs(ms) {
  if (ms < 1) return "< 1 ms";
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`;
}
