"""Of a request's answers the best: `n` of `best_of`, at the end and not before.

By mean log-probability per token, as OpenAI's `best_of`; the beams of a search come in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncllm.engine.output_collector import OutputCollector
from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.sampling_params import SamplingParams


class BestAnswers:
    """A sink before the client's `sink`, which hears of the request once, at its end.

    params: the client's own; log-probabilities that it did not ask for are left out.
    """

    def __init__(self, params: SamplingParams, sink: Callable[[RequestOutput], None]) -> None:
        self._params = params
        self._sink = sink
        self._collector = OutputCollector()

    def receive(self, delta: RequestOutput) -> None:
        self._collector.add(delta)
        if delta.finished and (output := self._collector.output) is not None:
            self._sink(self._choose(output))

    def _choose(self, output: RequestOutput) -> RequestOutput:
        answers = output.outputs
        if not self._params.use_beam_search:
            answers = sorted(answers, key=_mean_logprob, reverse=True)
        best, rest = answers[: self._params.n], answers[self._params.n :]
        for index, answer in enumerate(best):
            answer.index = index
            if self._params.num_logprobs is None:
                answer.logprobs = None
        num_rest = output.num_unreturned_tokens + sum(len(answer.token_ids) for answer in rest)
        return replace(output, outputs=best, num_unreturned_tokens=num_rest)


def _mean_logprob(answer: CompletionOutput) -> float:
    """Of an answer without a token: below every other."""
    if answer.cumulative_logprob is None or not answer.token_ids:
        return float("-inf")
    return answer.cumulative_logprob / len(answer.token_ids)
