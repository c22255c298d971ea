"""Merges a request's deltas into its cumulative output: for cumulative and final outputs, and for
`BestAnswers`, which chooses among several."""

from __future__ import annotations

from dataclasses import replace

from asyncllm.engine.output_state import Sink
from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.types import Request


class OutputCollector:
    """Call `add` with deltas and read `output`, a copy. Only `output` takes time linear in the
    length of the text."""

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None  # without its completions
        self._completions: dict[int, CompletionOutput] = {}  # without their texts
        self._texts: dict[int, list[str]] = {}  # pieces: appending to a string would copy it

    def add(self, delta: RequestOutput) -> None:
        if self._whole is None:
            self._whole = replace(delta, outputs=[])
        else:
            _update(self._whole, delta)
        for completion in delta.outputs:
            known = self._completions.get(completion.index)
            if known is None:
                self._completions[completion.index] = _copy(completion, "")
                self._texts[completion.index] = [completion.text]
            else:
                _extend(known, completion)
                self._texts[completion.index].append(completion.text)

    @property
    def output(self) -> RequestOutput:
        """A copy of the cumulative output, completions ordered by index. Needs at least a delta."""
        assert self._whole is not None, "nothing was added yet"
        completions = [
            _copy(self._completions[index], "".join(self._texts[index]))
            for index in sorted(self._completions)
        ]
        self._texts = {c.index: [c.text] for c in completions}  # keeps the joined text
        return replace(self._whole, outputs=completions)


def _update(whole: RequestOutput, delta: RequestOutput) -> None:
    whole.finished = delta.finished
    whole.metrics = delta.metrics
    whole.num_cached_tokens = delta.num_cached_tokens
    whole.num_unreturned_tokens += delta.num_unreturned_tokens
    whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
    whole.error = whole.error or delta.error


def _extend(known: CompletionOutput, delta: CompletionOutput) -> None:
    known.token_ids += delta.token_ids
    if known.logprobs is not None and delta.logprobs is not None:
        known.logprobs += delta.logprobs
    known.cumulative_logprob = delta.cumulative_logprob
    known.finish_reason, known.stop_reason = delta.finish_reason, delta.stop_reason


def _copy(completion: CompletionOutput, text: str) -> CompletionOutput:
    logprobs = None if completion.logprobs is None else list(completion.logprobs)
    return replace(completion, text=text, token_ids=list(completion.token_ids), logprobs=logprobs)


class BestAnswers:
    """A sink that collects all answers and gives `sink` one output: the best `n` of `best_of`.

    The best have the highest mean log-probability per token, as in OpenAI's `best_of`. A beam
    search has ranked its answers already. Logprobs that the client did not ask for are removed.
    """

    def __init__(self, request: Request, sink: Sink) -> None:
        self._request = request
        self._sink = sink
        self._collector = OutputCollector()

    def receive(self, delta: RequestOutput) -> None:
        self._collector.add(delta)
        if delta.finished:
            self._sink(self._choose(self._collector.output))

    def _choose(self, output: RequestOutput) -> RequestOutput:
        answers, params = output.outputs, self._request.sampling_params
        if not params.use_beam_search:
            answers = sorted(answers, key=_mean_logprob, reverse=True)
        best, rest = answers[: params.n], answers[params.n :]
        for index, answer in enumerate(best):
            answer.index = index
            if self._request.num_shown_logprobs is None and not params.logprob_token_ids:
                answer.logprobs = None
        num_rest = output.num_unreturned_tokens + sum(len(answer.token_ids) for answer in rest)
        return replace(output, outputs=best, num_unreturned_tokens=num_rest)


def _mean_logprob(answer: CompletionOutput) -> float:
    """An answer without tokens ranks last."""
    if answer.cumulative_logprob is None or not answer.token_ids:
        return float("-inf")
    return answer.cumulative_logprob / len(answer.token_ids)
