"""Beam search over log-probabilities alone: which beams go on, which have ended, when it is over.

It knows no sequence, page or step: `advance` takes for each live beam what may follow it. The rules
are those of transformers' `generate`:

  goes on   the `width` best continuations that neither stop nor reach `max_tokens`
  ends      a continuation that does, if it is among the `width` best of all
  kept      the `width` best that ended, by log-probability / length ** length_penalty

So of each live beam the `width` + (number of stop tokens) most likely tokens are enough to know.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncllm.sampling_params import EarlyStopping
from asyncllm.types import TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One token after its `parent`'s; `total` is the log-probability of all of them."""

    parent: Beam | None  # None: nothing but the prompt
    token_id: int
    logprobs: TokenLogprobs | None
    total: float
    num_tokens: int

    def path(self) -> list[Beam]:
        """Its ancestors and itself, one per token."""
        beams: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]


PROMPT = Beam(None, -1, None, 0.0, 0)


class BeamSearch:
    """`live` are the beams that go on; `ended` (score, beam) those that were kept, best first."""

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        length_penalty: float,
        early_stopping: EarlyStopping,
        num_top_logprobs: int = 0,
    ) -> None:
        """`num_top_logprobs`: how many of the tokens beside its own each beam remembers."""
        self.live = [PROMPT]
        self.ended: list[tuple[float, Beam]] = []
        self.is_over = False
        self._width = width
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_top_logprobs = num_top_logprobs

    def advance(self, rows: Sequence[TokenLogprobs]) -> None:
        """One token on. rows: what may follow each of `live`, most likely first."""
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

    def _ranked(self, rows: Sequence[TokenLogprobs]) -> Iterator[tuple[float, int, int]]:
        """(total, index of the beam, rank of the token) of every continuation, best first."""

        def continuations(index: int) -> Iterator[tuple[float, int, int]]:
            total = self.live[index].total
            for rank, logprob in enumerate(rows[index].top_logprobs):
                yield total + logprob, index, rank

        return heapq.merge(
            *map(continuations, range(len(self.live))), key=lambda found: found[0], reverse=True
        )

    def _child(self, index: int, row: TokenLogprobs, rank: int, total: float) -> Beam:
        parent, top = self.live[index], self._num_top_logprobs
        logprobs = TokenLogprobs(
            row.top_logprobs[rank], rank + 1, row.top_ids[:top], row.top_logprobs[:top]
        )
        return Beam(parent, row.top_ids[rank], logprobs, total, parent.num_tokens + 1)

    def _end(self, beam: Beam) -> None:
        score = beam.total / beam.num_tokens**self._length_penalty
        self.ended.append((score, beam))
        self.ended.sort(key=lambda entry: entry[0], reverse=True)
        del self.ended[self._width :]

    def _cannot_improve(self, num_tokens: int) -> bool:
        """Whether what has ended is final. `num_tokens`: of the live beams.

        False compares what the best live beam is worth now: right only where no beam gains by its
        length. "never" takes the length that is worth most.
        """
        if len(self.ended) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            num_tokens = self._max_tokens
        return self.live[0].total / num_tokens**self._length_penalty <= self.ended[-1][0]
