"""A grammar without text: which tokens may come at each position of an answer, by a seed."""

from __future__ import annotations

import random
from functools import cached_property

import numpy as np


class Automaton:
    """A `TokenConstraint` over `vocab_size` tokens, with one choice at `forced_share` of all."""

    def __init__(self, seed: int, vocab_size: int, forced_share: float = 0.5) -> None:
        self.num_accepted = 0
        self._seed, self._vocab_size, self._forced_share = seed, vocab_size, forced_share

    def allowed(self, position: int) -> frozenset[int]:
        rng = random.Random(f"{self._seed} {position}")
        num_choices = 1 if rng.random() < self._forced_share else self._vocab_size // 2
        return frozenset(rng.sample(range(self._vocab_size), num_choices))

    @cached_property
    def everything(self) -> frozenset[int]:
        return frozenset(range(self._vocab_size))

    def forbidden(self, position: int) -> frozenset[int]:
        return self.everything - self.allowed(position)

    def accept(self, token_id: int) -> None:
        if token_id not in self.allowed(self.num_accepted):
            raise ValueError(f"token {token_id} at {self.num_accepted}")
        self.num_accepted += 1

    def fill(self, bitmask: np.ndarray) -> None:
        bits = np.zeros(len(bitmask) * 32, np.uint8)
        bits[list(self.allowed(self.num_accepted))] = 1
        bitmask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        while len(allowed := self.allowed(self.num_accepted + len(forced))) == 1:
            forced += allowed
        return forced
