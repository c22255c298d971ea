"""Policies that place requests on the engines of a cluster: the real `Router`, and simpler ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from asyncllm.engine.data_parallel.router import Placement, Router


class Policy(Protocol):
    """The interface of `Router` that the simulation uses."""

    def place(self, token_ids: Sequence[int], key: bytes = b"") -> Placement | None: ...

    def begun(self, placement: Placement) -> None: ...

    def ended(self, placement: Placement) -> None: ...


class Blind:
    """A policy that ignores prompts: `choose` gets the number of live requests of each engine."""

    def __init__(self, num_engines: int, choose: Callable[[list[int]], int]) -> None:
        self._loads = [0] * num_engines
        self._choose = choose

    def place(self, token_ids: Sequence[int], key: bytes = b"") -> Placement | None:
        rank = self._choose(self._loads)
        self._loads[rank] += 1
        return Placement(rank, 1, 0)

    def begun(self, placement: Placement) -> None:
        """It only counts live requests."""

    def ended(self, placement: Placement) -> None:
        self._loads[placement.rank] -= 1


def policies(num_engines: int, capacity: int, seed: int) -> dict[str, Callable[[], Policy]]:
    """capacity: tokens that the KV cache of one engine holds."""
    return {
        "random": lambda: Blind(num_engines, _random_choice(random.Random(seed))),
        "round robin": lambda: Blind(num_engines, _in_turn(itertools.count())),
        "least load": lambda: Blind(num_engines, lambda loads: loads.index(min(loads))),
        "affinity": lambda: Router([capacity] * num_engines),
    }


def _random_choice(rng: random.Random) -> Callable[[list[int]], int]:
    return lambda loads: rng.randrange(len(loads))


def _in_turn(numbers: itertools.count[int]) -> Callable[[list[int]], int]:
    return lambda loads: next(numbers) % len(loads)
