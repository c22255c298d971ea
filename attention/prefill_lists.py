"""The lists by which FA3's prefill kernel works, of one step after another, brought in one copy.

FlashInfer's planner copies lists for the most rows that there may be. Ours lie below each other
like the rows of a matrix, whose first columns a step fills and one copy takes. Its last row is what
the step reads of prompts: the pages travel with the lists.

Knows what the kernel reads, as FlashInfer 0.6.12 has it, and not how it is launched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncllm.attention.base import AttentionLayer, PrefillRows
from asyncllm.attention.rotating_buffers import RotatingBuffers
from asyncllm.kernels.declaration import Launch
from asyncllm.kernels.prefill_lists import KERNEL, Args

NUM_BUFFERS = 2  # steps between plan and completion: one running, one launched ahead
LINE_WORDS = 32  # a list begins with a line of the cache
# The lists in the order of memory: where each block's tiles end, then an entry for each tile.
BLOCK_ENDS, HEADS, TILES, QUERY_STARTS, PAGE_STARTS, QUERY_LENS, KV_LENS = range(7)
NUM_LISTS = 7
# As FlashInfer's PrefillPlanSM90Info has them. Its last says which row a tile is of: the kernel
# looks at it for what we do not use, so it may be any list.
PLAN_ORDER = (
    TILES, QUERY_STARTS, PAGE_STARTS, QUERY_LENS, KV_LENS, HEADS, BLOCK_ENDS, TILES,
)  # fmt: skip
HEADS_SHARE = 0  # of the same plan: each head has tiles of its own


def tile_size(head_dim: int) -> int:
    """Queries of a tile."""
    return 192 if head_dim == 64 else 128


class Limits(NamedTuple):
    """The most that a step's prompts have."""

    tokens: int
    rows: int
    pages: int  # of all rows


class _Buffer(NamedTuple):
    """Pinned memory: the lists, to which `args` points, and behind them the rows."""

    args: Args
    rows: np.ndarray  # int32: query_indptr, kv_lens, page_indptr, pages, with nothing between


class PrefillLists:
    """The lists of one step after another, always at the same places on the device."""

    def __init__(
        self,
        layer: AttentionLayer,
        limits: Limits,
        make: Launch,
        num_blocks: int,
        device: torch.device,
        stream: int,
    ) -> None:
        """num_blocks: of the kernel, one for each SM. stream: on which it is run."""
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
            return _Buffer(args, memory.numpy()[self._rows_start :])  # which keeps the memory

        self._buffers = RotatingBuffers([buffer() for _ in range(NUM_BUFFERS)], device)

    @property
    def workspace(self) -> torch.Tensor:
        """uint8: `places` are offsets in it."""
        return self._words.view(torch.uint8)

    @property
    def pages(self) -> torch.Tensor:
        """int32: a row's are those from its PAGE_STARTS on."""
        return self._words[self._rows_start :]

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> None:
        """Enqueue the lists of these rows, whose tokens come after so many of decodes."""
        kv_lens, (pages,) = prefills.kv_lens, prefills.pages
        num_rows = len(kv_lens)
        rows = (prefills.query_indptr, kv_lens, prefills.page_indptr, pages)
        with self._buffers as buffer:
            args = buffer.args
            np.concatenate(rows, out=buffer.rows[: 3 * num_rows + 2 + len(pages)])
            args.num_decodes = num_decodes
            KERNEL.launch(self._make, args, num_rows, self._stream)
