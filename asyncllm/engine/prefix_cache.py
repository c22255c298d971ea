"""How much of a sequence's prefix is cached, in all cache groups and in the state memory.

It only reads the pools; block_manager.py holds and publishes pages. block_table.py describes the
names of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from asyncllm.cache_group import CacheGroup
from asyncllm.engine.block_hashes import BlockHashes
from asyncllm.engine.page_pool import PagePool
from asyncllm.engine.state_pool import StatePool
from asyncllm.types import Sequence


class PrefixCache:
    def __init__(
        self,
        device: PagePool,
        host: PagePool,
        states: StatePool | None,
        groups: SequenceOf[CacheGroup],
        hashes: BlockHashes,
    ) -> None:
        self._device, self._host, self._states = device, host, states
        self._groups, self._hashes = groups, hashes
        self._block_size = groups[0].block_size
        self._full = [g for g, group in enumerate(groups) if group.window is None]
        self._windows = [g for g, group in enumerate(groups) if group.window is not None]

    def match(self, seq: Sequence) -> int:
        """How many leading blocks of `seq` need not be computed: all that later tokens attend to is
        cached. At least its last token is left to compute."""
        most = self.num_found(seq)
        while most:
            hole = self._last_hole(seq, most) if self._windows else None
            if hole is None and self.has_state(seq, most):
                break
            most = most - 1 if hole is None else hole
        return most

    def num_found(self, seq: Sequence) -> int:
        """How many leading blocks of `seq` have pages in all groups without a window."""
        most = (len(seq.token_ids) - 1) // self._block_size
        if self._full:
            for i in range(most):  # hashes up to the first miss only
                block_hash = self._hashes.first(seq, i + 1)[i]
                if self._is_missing(block_hash, self._full):
                    return i
        return most

    def has_state(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether recurrent layers, if any, have a snapshot after `num_blocks`."""
        if self._states is None:
            return True
        return self._states.has(self._hashes.first(seq, num_blocks)[num_blocks - 1])

    def hash_at(self, seq: Sequence, num_tokens: int) -> bytes | None:
        """The hash of the last block that `num_tokens` fill; None if they fill none."""
        num_blocks = num_tokens // self._block_size
        return self._hashes.first(seq, num_blocks)[num_blocks - 1] if num_blocks else None

    def _last_hole(self, seq: Sequence, num_blocks: int) -> int | None:
        """The last block that is not cached, of those that a window needs after `num_blocks`."""
        hashes, end = self._hashes.first(seq, num_blocks), num_blocks * self._block_size
        holes = [
            i
            for g in self._windows
            for i in range(self._groups[g].first_block(end), num_blocks)
            if self._is_missing(hashes[i], [g])
        ]
        return max(holes, default=None)

    def _is_missing(self, block_hash: bytes, groups: list[int]) -> bool:
        """Whether one of these groups has the block neither on the device nor on the host."""
        for g in groups:
            name = block_hash + bytes((g,)) if g else block_hash
            if self._device.find(name) is None and self._host.find(name) is None:
                return True
        return False
