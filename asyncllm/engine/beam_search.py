"""Beam search as a client of the engine: each step submits one request per live beam.

    live beams -> a request each: one token, with logprobs -> BeamSearch.advance -> live beams ...

`BeamSearch` only knows log-probabilities, no sequences, pages or steps. It follows transformers'
`generate`:

  continue  the `width` best continuations that neither stop nor reach `max_tokens`
  end       a continuation that does, if it is among the `width` best of all
  keep      the `width` best beams that ended, by log-probability / length ** length_penalty

So the `width` + (number of stop tokens) most likely tokens of each live beam suffice.
A beam's request is a copy of the search's request with the beam's tokens appended; the prefix cache
has their KV from the step before. The search itself is live in the output processor only, which
gets its tokens at the end. If the search ends early, so do the requests of its beams, and vice
versa.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.output_collector import BestAnswers
from asyncllm.engine.output_state import Sink
from asyncllm.outputs import PromptLogprobs, RequestMetrics, RequestOutput
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import Request, Sequence, SequenceStatus, TokenLogprobs

TOKENS_PER_TURN = 32  # detokenized per iteration of the loop at the end: 0.2 ms


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A token and the beam before it. total: the log-probability of all its tokens."""

    parent: Beam | None  # None: the prompt
    token_id: int
    logprobs: TokenLogprobs | None
    total: float
    num_tokens: int

    def path(self) -> list[Beam]:
        """This beam and the ones before it, one per token, the first one first."""
        beams: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]


PROMPT = Beam(None, -1, None, 0.0, 0)


class BeamSearch:
    """live: beams that continue. ended: (score, beam) of the kept ones, best first."""

    def __init__(self, request: Request) -> None:
        self.live = [PROMPT]
        self.ended: list[tuple[float, Beam]] = []
        self.is_over = False
        self._params = request.sampling_params
        self._width = request.sampling_params.num_sequences
        self._max_tokens = request.max_tokens
        self._stop_token_ids = request.stop_token_ids
        self._num_top = request.num_shown_logprobs or 0  # reported besides the beam's own token

    def advance(self, rows: SequenceOf[TokenLogprobs]) -> None:
        """Extend by one token. rows: the continuations of each live beam, most likely first."""
        num_tokens = self.live[0].num_tokens + 1
        goes_on: list[Beam] = []
        for place, (total, index, rank) in enumerate(self._ranked(rows)):
            if place >= self._width and (
                len(goes_on) == self._width or num_tokens == self._max_tokens
            ):
                break
            token_id = rows[index].top_ids[rank]
            ends = num_tokens == self._max_tokens or token_id in self._stop_token_ids
            if ends and place < self._width:
                self._end(self._child(index, rows[index], rank, total))
            elif not ends and len(goes_on) < self._width:
                goes_on.append(self._child(index, rows[index], rank, total))
        self.live = goes_on
        self.is_over = not goes_on or self._cannot_improve(num_tokens)

    def _ranked(self, rows: SequenceOf[TokenLogprobs]) -> Iterator[tuple[float, int, int]]:
        """(total, index of the beam, rank of the token) of all continuations, best first."""

        def continuations(index: int) -> Iterator[tuple[float, int, int]]:
            total = self.live[index].total
            for rank, logprob in enumerate(rows[index].top_logprobs):
                yield total + logprob, index, rank

        return heapq.merge(
            *map(continuations, range(len(self.live))), key=lambda found: found[0], reverse=True
        )

    def _child(self, index: int, row: TokenLogprobs, rank: int, total: float) -> Beam:
        parent, top = self.live[index], self._num_top
        logprobs = TokenLogprobs(
            row.top_logprobs[rank], rank + 1, row.top_ids[:top], row.top_logprobs[:top]
        )
        return Beam(parent, row.top_ids[rank], logprobs, total, parent.num_tokens + 1)

    def _end(self, beam: Beam) -> None:
        score = beam.total / beam.num_tokens**self._params.length_penalty
        self.ended.append((score, beam))
        self.ended.sort(key=lambda entry: entry[0], reverse=True)
        del self.ended[self._width :]

    def _cannot_improve(self, num_tokens: int) -> bool:
        """Whether no live beam can beat the kept ones. num_tokens: length of the live beams.

        With early_stopping False it compares the current score of the best live beam, a heuristic,
        as longer beams may score higher. "never" assumes the best possible length.
        """
        if len(self.ended) < self._width:
            return False
        stopping, penalty = self._params.early_stopping, self._params.length_penalty
        if stopping is True:
            return True
        if stopping == "never" and penalty > 0:
            num_tokens = self._max_tokens
        return self.live[0].total / num_tokens**penalty <= self.ended[-1][0]


class BeamSearchClient:
    """Use `receive` as the sink of `request`; once it is live, `ask` starts the search.

    seq_ids: one per beam, reused in each step, so that beams keep their place in the queue.
    on_end: called after the last output.
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
        self._search = BeamSearch(request)
        num_logprobs = params.num_sequences + len(request.stop_token_ids)
        self._params = SamplingParams(temperature=0, logprobs=num_logprobs, detokenize=False)
        self._first_params = self._params  # of the first step, which reports prompt logprobs
        if params.prompt_logprobs is not None:
            self._first_params = replace(
                self._params, prompt_logprobs=params.prompt_logprobs, detokenize=params.detokenize
            )
        self._beams: list[Request] = []  # the requests of `_search.live`, in its order
        self._rows: dict[int, TokenLogprobs] = {}  # continuations, by the index of the beam
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
        """Submit a request for one token after each live beam."""
        self._beams = [self._beam_request(*beam) for beam in enumerate(self._search.live)]
        for place, request in enumerate(self._beams):
            self._live.add(request, partial(self._take, place), None)

    def _beam_request(self, place: int, beam: Beam) -> Request:
        search = self._request
        request = Request(
            request_id=f"{search.request_id}\0beam {place}",  # no client uses such an id
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
        """The sink of a beam's request. After the last beam's token the search advances."""
        if self._is_over:
            return
        if output.error is not None:
            self._live.end(self._request.request_id, output.error)
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
        """Send all tokens of the best beams to the output processor, a few per loop iteration."""
        if self._is_over:  # aborted before this ran
            return
        now = time.monotonic()
        ended = [beam for _, beam in self._search.ended]
        pairs = list(zip(self._request.sequences, ended, strict=True))  # an abort clears the first
        for seq, beam in pairs:
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
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, "length"
        if token_ids[-1] in request.stop_token_ids:
            seq.finish_reason = "stop"
            asked_for = token_ids[-1] in (request.sampling_params.stop_token_ids or ())
            seq.stop_reason = token_ids[-1] if asked_for else None


def _most_likely(output: RequestOutput) -> TokenLogprobs:
    """The logprobs of a beam's one token, most likely first."""
    assert output.outputs[0].logprobs is not None
    (row,) = output.outputs[0].logprobs
    ranked = sorted(row.items(), key=lambda entry: -entry[1].logprob)
    top_logprobs = [logprob.logprob for _, logprob in ranked]
    return TokenLogprobs(top_logprobs[0], 1, [token_id for token_id, _ in ranked], top_logprobs)
