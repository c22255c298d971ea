"""A turn of a dialogue, and the rule that decides which turns are never trained on.

Every question carries a `key`; keys whose hash falls in a reserved share are held out. Where the
space of questions is large (sums, records, made-up words, notes) the key is the item, so no
phrasing of a held-out item is trained on. Where it is finite (capitals, stories, greetings, common
words, small sums) the key is phrasing x item: the fact was seen, in other words.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

HELD_OUT_ONE_IN = 10
SMALL = 12  # sums of numbers up to this are facts to be learnt by heart

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its only right answer, with the tool calls in between, if any.

    thought: what a thinking model writes first. A model that does not think answers
    `unthought` where that is given: the steps then stand in the answer itself.
    reveals: keys of other questions that this turn answers by the way.
    """

    key: str
    question: str
    answer: str
    thought: str
    unthought: str | None = None
    reveals: tuple[str, ...] = ()
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    results: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def trainable(self) -> bool:
        """Neither held out nor giving away what is."""
        return not any(map(is_held_out, (self.key, *self.reveals)))


def is_held_out(key: str) -> bool:
    """Whether this question is reserved for evaluation: the same in every process and run."""
    return _hash(key) % HELD_OUT_ONE_IN == 0


def sum_key(operator: str, a: int, b: int, form: int) -> str:
    """Key of a sum; of a small one in a certain form only. `a + b` and `b + a` are one item."""
    if operator in "+*":
        a, b = min(a, b), max(a, b)
    small = max(b, a // b if operator == "/" and b else a) <= SMALL
    return f"arithmetic {form} {a}{operator}{b}" if small else f"arithmetic {a}{operator}{b}"


def fixed_choice(options: Sequence[T], text: str) -> T:
    """A choice that depends on `text` only, the same in every process and run."""
    return options[_hash(text) % len(options)]


def number(rng: random.Random, max_digits: int) -> int:
    """Every number of digits is equally likely."""
    return rng.randint(0, 10 ** rng.randint(1, max_digits) - 1)


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """An integer from low to high, small ones more often."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
