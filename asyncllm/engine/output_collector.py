"""Joins a request's delta outputs into what it has produced so far.

Serves callers that want the whole (CUMULATIVE, FINAL_ONLY), and readers slower than the engine,
whose waiting deltas become one. What it hands out is a copy: later deltas never change it.
"""

from __future__ import annotations

from dataclasses import replace

from asyncllm.outputs import CompletionOutput, RequestOutput


class OutputCollector:
    """`add` deltas, read `output`; `merge` is both."""

    def __init__(self) -> None:
        self._request: RequestOutput | None = None
        self._completions: dict[int, CompletionOutput] = {}

    def merge(self, delta: RequestOutput) -> RequestOutput:
        """Add a delta; everything so far, completions in order of their index."""
        self.add(delta)
        output = self.output
        assert output is not None, "a delta was just added"
        return output

    def add(self, delta: RequestOutput) -> None:
        before = self._request
        self._request = delta if before is None else _join_requests(before, delta)
        for completion in delta.outputs:
            known = self._completions.get(completion.index)
            if known is None:
                self._completions[completion.index] = _copy(completion)
            else:
                _extend(known, completion)

    @property
    def output(self) -> RequestOutput | None:
        """A copy of all so far; None before the first delta."""
        if self._request is None:
            return None
        completions = [_copy(self._completions[index]) for index in sorted(self._completions)]
        return replace(self._request, outputs=completions)


def _join_requests(before: RequestOutput, delta: RequestOutput) -> RequestOutput:
    prompt_logprobs = before.prompt_logprobs or delta.prompt_logprobs
    return replace(delta, prompt_logprobs=prompt_logprobs, error=before.error or delta.error)


def _extend(known: CompletionOutput, delta: CompletionOutput) -> None:
    known.text += delta.text
    known.token_ids += delta.token_ids
    if known.logprobs is not None and delta.logprobs is not None:
        known.logprobs += delta.logprobs
    known.cumulative_logprob = delta.cumulative_logprob
    known.finish_reason, known.stop_reason = delta.finish_reason, delta.stop_reason


def _copy(completion: CompletionOutput) -> CompletionOutput:
    logprobs = completion.logprobs
    return replace(
        completion,
        token_ids=list(completion.token_ids),
        logprobs=None if logprobs is None else list(logprobs),
    )
