"""Which of several engines takes a request: the one that has its prompt cached, if it is not busy.

`Router` remembers which prompts went where, in spans of `SPAN_TOKENS`, as an engine's prefix
cache would: the least recently used spans are forgotten first. Affinity and load are beliefs, kept
here and never asked for: a wrong one costs time, never an answer. No torch, no clock.
scripts/simulate_cluster.py compares it with policies that know less.
Invariant: `check_integrity()`; with no live request every load is 0.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SPAN_TOKENS = 64  # of a prompt: what is shorter has no affinity, and is quick to compute
# The load of a request is what keeps others waiting, in tokens of prefill: its own uncached prompt
# until its first token, and its share of each step until its last.
RUNNING_LOAD = 128
# An engine that holds a prompt is left for another where its load is over so many times the least
# one, and by more than SLACK_LOAD above it: what a few requests more cost is less than a prompt.
OVERLOAD_FACTOR = 2.0
SLACK_LOAD = 2048


@dataclass(slots=True)
class Placement:
    """Where a request is, and what it adds to that engine's load."""

    rank: int
    load: int
    num_cached_tokens: int  # of its prompt, by belief


class Router:
    """`capacity_tokens`: of each engine's prefix cache. Ranks count from 0."""

    def __init__(self, capacity_tokens: Sequence[int]) -> None:
        self._caches = [_SpanCache(tokens // SPAN_TOKENS) for tokens in capacity_tokens]
        self._holders: dict[int, int] = {}  # span -> bit mask of ranks
        self._loads = [0] * len(capacity_tokens)
        self._open = (1 << len(capacity_tokens)) - 1  # bit mask of ranks that take requests

    # --- which engines there are -------------------------------------------------------------

    def open(self, rank: int) -> None:
        self._open |= 1 << rank

    def close(self, rank: int) -> None:
        """It is dead or asleep, and gets nothing until `open`."""
        self._open &= ~(1 << rank)

    def forget(self, rank: int) -> None:
        """Its prefix cache is empty."""
        for span in self._caches[rank].clear():
            self._drop_holder(span, rank)

    def load(self, rank: int) -> int:
        return self._loads[rank]

    # --- requests ----------------------------------------------------------------------------

    def place(self, token_ids: Sequence[int], key: bytes = b"") -> Placement | None:
        """An open engine for a prompt, None where there is none. `key` separates prefix caches.

        Of the engines that hold most of the prompt the least loaded takes it; if that one is
        overloaded, of those that hold less; at last the least loaded of all, which never is.
        """
        if not self._open:
            return None
        spans = list(_spans(token_ids, key))
        least = min(map(self._loads.__getitem__, _ranks(self._open)))
        rank, depth = next(
            (rank, depth)
            for depth, mask in self._by_depth(spans)
            if not self._is_overloaded(rank := self._least_loaded(mask), least)
        )
        num_cached = depth * SPAN_TOKENS
        placement = Placement(rank, RUNNING_LOAD + len(token_ids) - num_cached, num_cached)
        self._loads[rank] += placement.load
        self._remember(rank, spans)
        return placement

    def begun(self, placement: Placement) -> None:
        """It has its first token: its prompt keeps nobody waiting any more."""
        self._loads[placement.rank] -= placement.load - RUNNING_LOAD
        placement.load = RUNNING_LOAD

    def ended(self, placement: Placement) -> None:
        self._loads[placement.rank] -= placement.load
        placement.load = 0

    # --- inside ------------------------------------------------------------------------------

    def _by_depth(self, spans: list[int]) -> Iterator[tuple[int, int]]:
        """(number of spans, mask of the open engines that hold so many), the most first. The last
        mask has all of them."""
        found, mask = [(0, self._open)], self._open
        for depth, span in enumerate(spans, 1):
            mask &= self._holders.get(span, 0)
            if not mask:
                break
            if found[-1][1] == mask:
                found.pop()
            found.append((depth, mask))
        return reversed(found)

    def _is_overloaded(self, rank: int, least: int) -> bool:
        return self._loads[rank] > max(OVERLOAD_FACTOR * least, least + SLACK_LOAD)

    def _least_loaded(self, mask: int) -> int:
        return min(_ranks(mask), key=self._loads.__getitem__)

    def _remember(self, rank: int, spans: list[int]) -> None:
        bit = 1 << rank
        for span in spans:
            self._holders[span] = self._holders.get(span, 0) | bit
        for span in self._caches[rank].hold(spans):
            self._drop_holder(span, rank)

    def _drop_holder(self, span: int, rank: int) -> None:
        mask = self._holders[span] & ~(1 << rank)
        if mask:
            self._holders[span] = mask
        else:
            del self._holders[span]

    def check_integrity(self) -> None:
        """Assert that the masks say what the caches hold, and that no load is negative."""
        held = {(span, rank) for rank, c in enumerate(self._caches) for span in c.spans}
        named = {(span, rank) for span, mask in self._holders.items() for rank in _ranks(mask)}
        assert held == named, f"{len(held ^ named)} spans are in one of both books"
        assert min(self._loads) >= 0, f"loads {self._loads}"


class _SpanCache:
    """The spans that one engine is believed to hold, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.spans: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def hold(self, spans: list[int]) -> list[int]:
        """They are the most recently used, their tails less so; what is forgotten for them."""
        for span in reversed(spans):
            self.spans[span] = None
            self.spans.move_to_end(span)
        num_over = max(len(self.spans) - self._capacity, 0)
        return [self.spans.popitem(last=False)[0] for _ in range(num_over)]

    def clear(self) -> list[int]:
        spans = list(self.spans)
        self.spans.clear()
        return spans


def _spans(token_ids: Sequence[int], key: bytes) -> Iterator[int]:
    """A number for each full span, which stands for all tokens up to its end. Python's own hash,
    with the process's secret: equal numbers of two prompts would misplace one, no more."""
    tokens = array("i", token_ids)
    data, size, parent = tokens.tobytes(), SPAN_TOKENS * tokens.itemsize, hash(key)
    for start in range(0, len(data) - size + 1, size):
        parent = hash((parent, data[start : start + size]))
        yield parent


def _ranks(mask: int) -> Iterator[int]:
    """The set bits, ascending. Of a thousand this is quicker than arithmetic with the mask."""
    return (rank for rank, bit in enumerate(reversed(bin(mask))) if bit == "1")
