"""Cache groups: layers that hold the same blocks of a sequence, and so share a block table. No
torch.

Layers with full attention keep all blocks. Layers with a window keep the blocks that later tokens
still attend to, and need pages for the largest step:

    first_block                        last computed position      end
    |--- attended to by the next token --------------|-- a step --|
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class CacheGroup(NamedTuple):
    """window: the number of tokens that a token attends to, including itself; None: all."""

    block_size: int
    window: int | None = None
    max_step_tokens: int = 0  # of a sequence; only used with a window

    @property
    def max_blocks(self) -> int:
        """The most blocks that a sequence holds at a time."""
        if self.window is None:
            return sys.maxsize
        num_tokens = self.window - 1 + self.max_step_tokens
        return -(-num_tokens // self.block_size) + 1  # both ends may be within a block

    def first_block(self, num_computed: int) -> int:
        """The first block that tokens from position `num_computed` on attend to."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.window + 1) // self.block_size

    def end(self, first: int, num_blocks: int) -> int:
        """The end of the blocks that are held, of `num_blocks`, from `first` on."""
        return num_blocks if self.window is None else min(num_blocks, first + self.max_blocks)


def num_pages_for(groups: Sequence[CacheGroup], num_blocks: int) -> int:
    """The most pages that a sequence of `num_blocks` holds at a time, in all groups."""
    return sum(group.end(0, num_blocks) for group in groups)


def num_blocks_that_fit(groups: Sequence[CacheGroup], num_pages: int, most: int) -> int:
    """The number of blocks of the longest sequence that fits in `num_pages`, up to `most`."""
    sizes = range(1, most + 1)
    return bisect_right(sizes, num_pages, key=lambda size: num_pages_for(groups, size))
