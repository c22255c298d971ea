"""Attention of whole mixed steps in a graph: FA3 for the prefills, our own kernel for the decodes.

FlashInfer's FA3 kernel has one block for each multiprocessor, which takes its work from lists that
the planner leaves in a workspace: of a plan, a launch knows only where these begin. Planned for the
same most tokens and rows each time they begin at the same places, so a captured launch does what
the last plan says. The decodes' kernel (balanced_decode.py) goes by lengths on the device. It is
launched on a stream of its own, a moment behind FA3: multiprocessors that have no prompt's tiles
left begin with the decodes' while others still work.

With flashinfer.py, flashinfer_prefill.py and xqa_call.py the adapter to FlashInfer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncllm.attention.balanced_decode import MAX_ROWS, BalancedDecode
from asyncllm.attention.base import AttendRows, AttentionLayer, DecodeRows, PrefillRows
from asyncllm.attention.flashinfer_import import flashinfer
from asyncllm.attention.flashinfer_prefill import (
    TESTED_VERSION,
    PrefillModule,
    Rows,
    prefill_backend,
)
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.turns import Turns

MAX_PREFILLS = 256  # rows
MAX_PAGES = 1 << 16  # of all rows
LISTS_BYTES = 4 << 20
NUM_PLANS = 2  # steps between plan and completion: one running, one launched ahead
NO_PREFILLS = PrefillRows(*(np.zeros(n, np.int32) for n in (1, 0, 1, 0)))


def supports(layers: list[AttentionLayer], device: torch.device) -> bool:
    """Where FA3 does all layers, called as `PrefillModule` calls it."""
    capability = torch.cuda.get_device_capability(device)
    return flashinfer.__version__ == TESTED_VERSION and all(
        prefill_backend(capability, layer.window) == "fa3" for layer in layers
    )


class FlashInferSteps:
    """A `StepAttention`, for layers that differ in nothing."""

    max_decodes = MAX_ROWS
    max_prefills = MAX_PREFILLS
    max_pages = MAX_PAGES

    def __init__(
        self,
        layer: AttentionLayer,
        cache: KVCache,
        workspace: torch.Tensor,
        balanced: BalancedDecode,
        max_tokens: int,
    ) -> None:
        """`layer`: any of them. `workspace` may be shared with what else runs on the stream."""
        device = workspace.device
        self._keys_values = [(layer[:, 0], layer[:, 1]) for layer in cache.layers]
        self._balanced = balanced
        self._rows = _FixedRows(device)
        self._side = torch.cuda.Stream(device)
        lists = torch.empty(LISTS_BYTES, dtype=torch.uint8, device=device)
        self._turns = Turns(
            [
                _Plan(PrefillModule(layer, cache, workspace, lists), self._rows, max_tokens)
                for _ in range(NUM_PLANS)
            ],
            device,
        )
        with self._turns as plan:
            self._places = plan.prepare(0, NO_PREFILLS)  # of every plan
            self._module = plan.module  # which is planned, so it can be bound

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> None:
        with self._turns as plan:
            places = plan.prepare(num_decodes, prefills)
        assert places == self._places, "a plan that is not where captured launches look for it"

    def bind(self, decodes: DecodeRows | None, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        prefill = self._module.bind(q, out)
        if decodes is None:
            return lambda layer: prefill(*self._keys_values[layer.index])
        tables, lengths = decodes.block_tables, decodes.positions + 1  # 0: none's
        rows = slice(len(lengths))
        main, side = torch.cuda.current_stream(q.device), self._side
        with torch.cuda.stream(side):
            # Started early it would come before FA3.
            decode = self._balanced.bind(q[rows], tables, lengths, out[rows], starts_early=False)

        def attend(layer: AttentionLayer) -> None:
            side.wait_stream(main)  # keys and values are written
            prefill(*self._keys_values[layer.index])
            with torch.cuda.stream(side):
                decode(layer)
            main.wait_stream(side)  # what comes next reads all rows of `out`

        return attend


class _Arrays(NamedTuple):
    """The host's views of a plan's rows, int32."""

    indptrs: np.ndarray  # [2, MAX_PREFILLS + 1]: of queries, of pages
    kv_lens: np.ndarray
    pages: np.ndarray


class _FixedRows:
    """A step's prefill rows on the device, always at the same addresses; rows beyond are empty.

    FA3 goes by `kv_lens`: lengths of last pages, which the call has too, are never filled.
    """

    def __init__(self, device: torch.device) -> None:
        self._sizes = (MAX_PREFILLS + 1, MAX_PREFILLS + 1, MAX_PREFILLS, MAX_PREFILLS, MAX_PAGES)
        self._tensor = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self.on_device = self.split(self._tensor)

    def split(self, tensor: torch.Tensor) -> Rows:
        query_indptr, page_indptr, kv_lens, last_page_lens, pages = tensor.split(self._sizes)
        return Rows(pages, query_indptr, page_indptr, last_page_lens, kv_lens)

    def pinned(self) -> torch.Tensor:
        return torch.zeros(len(self._tensor), dtype=torch.int32, pin_memory=True)

    def put(
        self, num_decodes: int, prefills: PrefillRows, pinned: torch.Tensor, arrays: _Arrays
    ) -> None:
        """By way of a `pinned` tensor, which the device reads later. Without waiting for it."""
        num_rows, num_pages = len(prefills.kv_lens), len(prefills.pages)
        indptrs = arrays.indptrs
        indptrs[0, : num_rows + 1] = prefills.query_indptr
        indptrs[1, : num_rows + 1] = prefills.page_indptr
        indptrs[:, num_rows + 1 :] = indptrs[:, num_rows : num_rows + 1]
        if num_decodes:
            indptrs[0] += num_decodes
        arrays.kv_lens[:num_rows] = prefills.kv_lens
        arrays.kv_lens[num_rows:] = 0
        arrays.pages[:num_pages] = prefills.pages
        end = len(pinned) - MAX_PAGES + num_pages
        self._tensor[:end].copy_(pinned[:end], non_blocking=True)


class _Plan:
    """One of those that take turns: the planner's pinned memory and the rows', read later."""

    def __init__(self, module: PrefillModule, rows: _FixedRows, max_tokens: int) -> None:
        self.module = module
        self._rows, self._max_tokens = rows, max_tokens
        self._pinned = rows.pinned()
        self._host = host = rows.split(self._pinned)
        indptrs = self._pinned.numpy()[: 2 * len(host.query_indptr)]  # side by side
        self._arrays = _Arrays(indptrs.reshape(2, -1), host.kv_lens.numpy(), host.pages.numpy())

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> tuple[int, ...]:
        """The plan's `places`."""
        self._rows.put(num_decodes, prefills, self._pinned, self._arrays)
        self.module.plan(self._host, self._rows.on_device, self._max_tokens)
        return self.module.places
