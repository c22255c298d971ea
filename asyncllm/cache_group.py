"""A cache group: layers of which a sequence holds the same blocks, so one list of pages. No torch.

Layers that see all tokens before keep every block. Layers of a window keep those that tokens to
come still see, and while a prompt is computed room for the largest step:

    first_block                        last position computed      end
    |--- seen by the next token ---------------------|-- a step --|
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class CacheGroup(NamedTuple):
    """`window`: tokens that each token sees, itself included; None: all."""

    block_size: int
    window: int | None = None
    max_step_tokens: int = 0  # of one sequence; used with a window

    @property
    def max_blocks(self) -> int:
        """The most that a sequence holds at a time."""
        if self.window is None:
            return sys.maxsize
        num_tokens = self.window - 1 + self.max_step_tokens
        return -(-num_tokens // self.block_size) + 1  # neither end need be a block's

    def first_block(self, num_computed: int) -> int:
        """The first that tokens from position `num_computed` on see."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.window + 1) // self.block_size

    def end(self, first: int, num_blocks: int) -> int:
        """Behind the last block that is held of so many, from `first` on."""
        return num_blocks if self.window is None else min(num_blocks, first + self.max_blocks)


def num_pages_for(groups: Sequence[CacheGroup], num_blocks: int) -> int:
    """The most pages that a sequence of so many blocks holds at a time, in all groups."""
    return sum(group.end(0, num_blocks) for group in groups)


def num_blocks_that_fit(groups: Sequence[CacheGroup], num_pages: int, most: int) -> int:
    """Blocks of the longest sequence that so many pages hold; `most` at most."""
    sizes = range(1, most + 1)
    return bisect_right(sizes, num_pages, key=lambda size: num_pages_for(groups, size))
