"""A beam search as a client of the engine, as in vLLM: each step is a request per live beam.

    live beams -> a request each: one token, with logprobs -> BeamSearch.advance -> live beams ...

A beam's request is the search's own, resumed behind the beam's tokens: what the step before
computed of them is in the prefix cache. The search is live in the outputs alone, which hear of its
tokens when it is over. Whatever ends it ends the beams' requests, and the other way round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from asyncllm.engine.beam_search import Beam, BeamSearch
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.output_collector import BestAnswers
from asyncllm.engine.output_state import Sink
from asyncllm.outputs import PromptLogprobs, RequestMetrics, RequestOutput
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import FinishReason, Request, Sequence, SequenceStatus, TokenLogprobs

TOKENS_PER_TURN = 32  # of the loop, of those that are detokenised at the end: 0.2 ms


class BeamSearchClient:
    """`receive` is the sink of `request`, and `ask` begins the search, once it is live.

    `seq_ids`: one per beam, used in each step again, so that beams keep their place in the queue.
    `on_end` is called after the last output.
    """

    def __init__(
        self,
        request: Request,
        seq_ids: list[int],
        live: LiveRequests,
        sink: Sink,
        on_end: Callable[[], None],
    ) -> None:
        params = request.sampling_params
        self._request = request
        self._seq_ids = seq_ids
        self._live = live
        self._on_end = on_end
        self._answers = BestAnswers(request, sink)
        self._search = BeamSearch(
            width=params.num_sequences,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            num_top_logprobs=request.num_shown_logprobs or 0,
        )
        num_logprobs = params.num_sequences + len(request.stop_token_ids)
        self._params = SamplingParams(temperature=0, logprobs=num_logprobs, detokenize=False)
        self._first_params = self._params  # the first step reports the prompt's logprobs, with text
        if params.prompt_logprobs is not None:
            self._first_params = replace(
                self._params, prompt_logprobs=params.prompt_logprobs, detokenize=params.detokenize
            )
        self._beams: list[Request] = []  # of `_search.live`, in its order
        self._rows: dict[int, TokenLogprobs] = {}  # what may follow each, by its place
        self._prompt_logprobs: PromptLogprobs | None = None
        self._is_over = False
        self._delivery: asyncio.Task[None] | None = None

    def receive(self, delta: RequestOutput) -> None:
        if delta.prompt_logprobs is not None:
            delta.prompt_logprobs = self._prompt_logprobs
        if delta.finished:
            self._is_over = True
            for beam in self._beams:
                self._live.abort(beam.request_id, "application")
        self._answers.receive(delta)

    # --- a step ------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for one token after each live beam."""
        self._beams = [self._beam_request(*beam) for beam in enumerate(self._search.live)]
        for place, request in enumerate(self._beams):
            self._live.add(request, partial(self._take, place), None)

    def _beam_request(self, place: int, beam: Beam) -> Request:
        search = self._request
        request = Request(
            request_id=f"{search.request_id}\0beam {place}",  # no client's id
            prompt=None,
            prompt_token_ids=search.prompt_token_ids,
            sampling_params=self._params if beam.num_tokens else self._first_params,
            max_tokens=beam.num_tokens + 1,
            stop_token_ids=frozenset(),
            metrics=RequestMetrics(arrival_time=search.metrics.arrival_time),
            priority=search.priority,
            cache_key=search.cache_key,
            parent=search,
            adapter_slot=search.adapter_slot,
        )
        token_ids = search.prompt_token_ids + [step.token_id for step in beam.path()]
        request.sequences = [Sequence(self._seq_ids[place], request, 0, 0, token_ids)]
        return request

    def _take(self, place: int, output: RequestOutput) -> None:
        """Take a beam's token; after the last beam's all go one token on."""
        if self._is_over:
            return
        if output.error is not None:
            self._live.end(self._request, output.error)
            return
        search, metrics = self._request, output.metrics
        assert metrics is not None and output.outputs[0].logprobs is not None
        search.metrics.num_preemptions += metrics.num_preemptions
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if self._search.live[place].num_tokens == 0:
            search.sequences[0].num_cached_tokens = output.num_cached_tokens
        self._rows[place] = _most_likely(output)
        if len(self._rows) == len(self._beams):
            self._advance()

    def _advance(self) -> None:
        self._search.advance([self._rows[place] for place in range(len(self._beams))])
        self._rows.clear()
        self._beams = []
        if self._search.is_over:
            self._delivery = asyncio.create_task(self._deliver(), name="asyncllm beam search")
        else:
            self.ask()

    # --- the end -----------------------------------------------------------------------------

    async def _deliver(self) -> None:
        """Give the outputs all tokens of the best beams, a few in each turn of the loop."""
        now = time.monotonic()
        ended = [beam for _, beam in self._search.ended]
        for seq, beam in zip(self._request.sequences, ended, strict=True):
            path = beam.path()
            self._finish(seq, [step.token_id for step in path])
            updates = [(seq, step.token_id, step.logprobs) for step in path]
            for start in range(0, len(updates), TOKENS_PER_TURN):
                if self._is_over:
                    return
                self._live.emit_whole(updates[start : start + TOKENS_PER_TURN], now)
                await asyncio.sleep(0)
        self._on_end()

    def _finish(self, seq: Sequence, token_ids: list[int]) -> None:
        request = self._request
        seq.token_ids += token_ids
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, FinishReason.LENGTH
        if token_ids[-1] in request.stop_token_ids:
            seq.finish_reason = FinishReason.STOP
            asked_for = token_ids[-1] in (request.sampling_params.stop_token_ids or ())
            seq.stop_reason = token_ids[-1] if asked_for else None


def _most_likely(output: RequestOutput) -> TokenLogprobs:
    """The row of a beam's only token, most likely first."""
    assert output.outputs[0].logprobs is not None
    (row,) = output.outputs[0].logprobs
    ranked = sorted(row.items(), key=lambda entry: -entry[1].logprob)
    top_logprobs = [logprob.logprob for _, logprob in ranked]
    return TokenLogprobs(top_logprobs[0], 1, [token_id for token_id, _ in ranked], top_logprobs)
