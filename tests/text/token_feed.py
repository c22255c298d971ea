"""A scheduler's part, as far as the output processor sees it: tokens in, sequences finished."""

from __future__ import annotations

import itertools
from typing import Any

from asyncllm.engine.output_processor import OutputProcessor, Stop
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.outputs import FinishReason, RequestMetrics, RequestOutput
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import Request, Sequence, SequenceStatus, TokenLogprobs

_seq_ids = itertools.count(1)


def make_request(
    request_id: str = "r",
    prompt_ids: list[int] | None = None,
    eos: frozenset[int] = frozenset(),
    **params: Any,
) -> Request:
    sampling = SamplingParams(**{"max_tokens": 1000} | params)
    assert sampling.max_tokens is not None
    request = Request(
        request_id=request_id,
        prompt="the prompt",
        prompt_token_ids=prompt_ids or [3],
        sampling_params=sampling,
        max_tokens=sampling.max_tokens,
        stop_token_ids=eos | frozenset(sampling.stop_token_ids or ()),
        metrics=RequestMetrics(arrival_time=100.0),
    )
    request.sequences = [
        Sequence(next(_seq_ids), request, index, 0, list(request.prompt_token_ids))
        for index in range(sampling.n)
    ]
    return request


class TokenFeed:
    """Feeds an `OutputProcessor` as the engine does. Each step takes a tenth of a second."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.now = 101.0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.outputs[request.request_id] = []
            self.processor.add(request, self.outputs[request.request_id].append)

    def step(
        self,
        tokens: dict[Sequence, int] | list[tuple[Sequence, int]],
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None,
    ) -> list[Stop]:
        """Give tokens to sequences; those that reach a stop token or their limit are finished."""
        updates = []
        for seq, token_id in tokens.items() if isinstance(tokens, dict) else tokens:
            seq.token_ids.append(token_id)
            self._check_stop(seq, token_id)
            updates.append((seq, token_id, logprobs))
        stops = self.processor.process(updates, prompt_logprobs or {}, self.now)
        for seq, reason, stop_reason in stops:
            assert seq.status is not SequenceStatus.FINISHED, "the scheduler has it already"
            finish(seq, reason, stop_reason)
        self.now += 0.1
        return stops

    def run(self, seq: Sequence, token_ids: list[int]) -> list[RequestOutput]:
        """Tokens one by one until the sequence ends; its request's outputs."""
        for token_id in token_ids:
            if seq.status is SequenceStatus.FINISHED:
                break
            self.step({seq: token_id})
        return self.outputs[seq.request.request_id]

    def _check_stop(self, seq: Sequence, token_id: int) -> None:
        request = seq.request
        own = request.sampling_params.stop_token_ids or ()
        if token_id in request.stop_token_ids:
            finish(seq, "stop", token_id if token_id in own else None)
        elif seq.num_output_tokens >= request.max_tokens:
            finish(seq, "length", None)


def finish(seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
    seq.status = SequenceStatus.FINISHED
    seq.finish_reason, seq.stop_reason = reason, stop_reason
