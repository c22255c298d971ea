"""A grammar without text: which tokens may come at each position of an answer, by a seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import numpy as np


@lru_cache(maxsize=1024)
def _choices(seed: int, position: int, vocab_size: int, forced_share: float) -> frozenset[int]:
    rng = np.random.default_rng([seed, position])
    num_choices = 1 if rng.random() < forced_share else vocab_size // 2
    return frozenset(rng.choice(vocab_size, num_choices, replace=False).tolist())


class Automaton:
    """A `TokenConstraint` over `vocab_size` tokens, with one choice at `forced_share` of all."""

    def __init__(self, seed: int, vocab_size: int, forced_share: float = 0.5) -> None:
        self.num_accepted = 0
        self._seed, self._vocab_size, self._forced_share = seed, vocab_size, forced_share

    def allowed(self, position: int) -> frozenset[int]:
        return _choices(self._seed, position, self._vocab_size, self._forced_share)

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

    @staticmethod
    def accept_many(many: list[Automaton], token_ids: list[list[int]]) -> list[Exception | None]:
        def accept(one: Automaton, tokens: list[int]) -> None:
            for token_id in tokens:
                one.accept(token_id)

        return [_raised(accept, *each) for each in zip(many, token_ids, strict=True)]

    @staticmethod
    def fill_many(many: list[Automaton], bitmasks: np.ndarray) -> list[Exception | None]:
        return [_raised(one.fill, row) for one, row in zip(many, bitmasks, strict=True)]

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        while len(allowed := self.allowed(self.num_accepted + len(forced))) == 1:
            forced += allowed
        return forced


def _raised(call: Callable[..., None], *args: Any) -> Exception | None:
    try:
        call(*args)
    except Exception as error:
        return error
    return None
