"""Fills the work lists of FA3's prefill kernel for full graphs, with one copy per step.

FlashInfer's planner copies lists of the maximal size. Here the lists are the rows of a matrix: a
step fills the first columns, and one copy transfers these. The matrix' last row holds the prefill
rows, so pages are part of the copy.

This file knows the format of the lists in FlashInfer 0.6.12, but not how the kernel is launched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncllm.attention.base import AttentionLayer, PrefillRows
from asyncllm.attention.rotating_buffers import RotatingBuffers
from asyncllm.kernels.declaration import Launch
from asyncllm.kernels.prefill_lists import KERNEL, Args

NUM_BUFFERS = 2  # one of the running step, one of the step launched ahead
LINE_WORDS = 32  # lists are aligned to cache lines
# The lists in memory order: the end of each block's tiles, then lists with an entry per tile.
BLOCK_ENDS, HEADS, TILES, QUERY_STARTS, PAGE_STARTS, QUERY_LENS, KV_LENS = range(7)
NUM_LISTS = 7
# The order of FlashInfer's PrefillPlanSM90Info. The last one, the row of each tile, is read for
# features that we do not use, so it may be any list.
PLAN_ORDER = (
    TILES, QUERY_STARTS, PAGE_STARTS, QUERY_LENS, KV_LENS, HEADS, BLOCK_ENDS, TILES,
)  # fmt: skip
HEADS_SHARE = 0  # same_schedule_for_all_heads: each head has tiles of its own


def tile_size(head_dim: int) -> int:
    """The number of queries in a tile."""
    return 192 if head_dim == 64 else 128


class Limits(NamedTuple):
    """The most tokens, rows and pages of a step's prefills."""

    tokens: int
    rows: int
    pages: int  # of all rows


class _Buffer(NamedTuple):
    """Pinned memory: the lists, at the address in `args`, followed by the rows."""

    args: Args
    rows: np.ndarray  # int32: query_indptr, kv_lens, page_indptr, pages, without gaps


class PrefillLists:
    """The lists of the current step, always at the same addresses on the device."""

    def __init__(
        self,
        layer: AttentionLayer,
        limits: Limits,
        make: Launch,
        num_blocks: int,
        device: torch.device,
        stream: int,
    ) -> None:
        """num_blocks: blocks of the kernel, one per SM. stream: the stream that it runs on."""
        tile = tile_size(layer.head_dim)
        max_tiles = -(-limits.tokens // tile) + limits.rows - 1  # of one head
        max_words = max(max_tiles * layer.num_heads, num_blocks + 1)
        pitch = -(-max_words // LINE_WORDS) * LINE_WORDS
        self._rows_start = NUM_LISTS * pitch
        size = self._rows_start + max(3 * limits.rows + 2 + limits.pages, pitch)
        self._words = torch.zeros(size, dtype=torch.int32, device=device)
        self._make, self._stream = make, stream
        self.places = (*(self._words.itemsize * pitch * which for which in PLAN_ORDER), HEADS_SHARE)

        def buffer() -> _Buffer:
            memory = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
            args = Args(
                host=memory.data_ptr(),
                device=self._words.data_ptr(),
                pitch=pitch,
                heads=layer.num_heads,
                tile=tile,
                blocks=num_blocks,
            )
            return _Buffer(args, memory.numpy()[self._rows_start :])  # keeps the memory alive

        self._buffers = RotatingBuffers([buffer() for _ in range(NUM_BUFFERS)], device)

    @property
    def workspace(self) -> torch.Tensor:
        """The lists as uint8; `places` are byte offsets in it."""
        return self._words.view(torch.uint8)

    @property
    def pages(self) -> torch.Tensor:
        """The rows' memory, int32. PAGE_STARTS has the index of each row's first page in it."""
        return self._words[self._rows_start :]

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> None:
        """Enqueue the lists of these rows, whose tokens come after `num_decodes` decodes."""
        kv_lens, (pages,) = prefills.kv_lens, prefills.pages
        num_rows = len(kv_lens)
        rows = (prefills.query_indptr, kv_lens, prefills.page_indptr, pages)
        with self._buffers as buffer:
            args = buffer.args
            np.concatenate(rows, out=buffer.rows[: 3 * num_rows + 2 + len(pages)])
            args.num_decodes = num_decodes
            KERNEL.launch(self._make, args, num_rows, self._stream)
