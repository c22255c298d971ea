"""`--stream-interval N`: a stream's chunks bring N tokens each, but for the first and the last.

Fewer, larger chunks cost the server and its clients less; the first token is not held back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.server.http.errors import ApiError
from asyncllm.server.outputs.generation import Consumer


@dataclass(slots=True)
class _Held:
    """One prompt's steps: held as text or as outputs, but for the first and the last."""

    has_begun: bool = False
    text: str = ""
    num_tokens: int = 0
    output: RequestOutput | None = None


class EveryNTokens:
    """A `Consumer` in front of another."""

    def __init__(self, consumer: Consumer, interval: int, num_prompts: int) -> None:
        self._consumer = consumer
        self._interval = interval
        self._held = [_Held() for _ in range(num_prompts)]

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        held = self._held[prompt_index]
        self._flush_text(prompt_index, held)
        if held.output is not None:
            output = merged(held.output, output)
        most = max((len(answer.token_ids) for answer in output.outputs), default=0)
        if held.has_begun and not output.finished and most < self._interval:
            held.output = output
            return
        held.has_begun, held.output = True, None
        self._consumer.feed(prompt_index, output)

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        held = self._held[prompt_index]
        held.text += text
        held.num_tokens += num_tokens
        if held.num_tokens >= self._interval:
            self._flush_text(prompt_index, held)

    def finish(self) -> None:
        self._consumer.finish()

    def fail(self, error: ApiError) -> None:
        for prompt_index, held in enumerate(self._held):
            self._flush_text(prompt_index, held)
            if held.output is not None:
                self._consumer.feed(prompt_index, held.output)
        self._consumer.fail(error)

    def _flush_text(self, prompt_index: int, held: _Held) -> None:
        if held.num_tokens:
            text, num_tokens = held.text, held.num_tokens
            held.text, held.num_tokens = "", 0
            self._consumer.feed_text(prompt_index, text, num_tokens)


def merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas of a request as one."""
    answers = {answer.index: answer for answer in first.outputs}
    for answer in second.outputs:
        before = answers.get(answer.index)
        answers[answer.index] = answer if before is None else _joined(before, answer)
    return replace(
        second,
        outputs=list(answers.values()),
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        num_unreturned_tokens=first.num_unreturned_tokens + second.num_unreturned_tokens,
    )


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    has_logprobs = first.logprobs is not None or second.logprobs is not None
    return replace(
        second,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=[*(first.logprobs or ()), *(second.logprobs or ())] if has_logprobs else None,
    )
