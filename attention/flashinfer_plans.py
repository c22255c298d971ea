"""Whole mixed steps as FlashInfer's own planner plans them, where prefill_lists.py cannot.

Planned for the same most tokens and rows each time, its lists begin at the same places in the
workspace. Part of the adapter to FlashInfer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncllm.attention.base import AttentionLayer, PrefillRows
from asyncllm.attention.flashinfer_prefill import PrefillModule, Rows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.prefill_lists import Limits
from asyncllm.attention.turns import Turns

LISTS_BYTES = 4 << 20
NUM_PLANS = 2  # steps between plan and completion: one running, one launched ahead
NO_PREFILLS = PrefillRows(*(np.zeros(n, np.int32) for n in (1, 0, 1, 0)))


class FlashInferPlans:
    """The plans of one step after another, which take turns."""

    def __init__(
        self, layer: AttentionLayer, cache: KVCache, workspace: torch.Tensor, limits: Limits
    ) -> None:
        """`workspace` may be shared with what else runs on the stream."""
        device = workspace.device
        rows = _FixedRows(limits, device)
        lists = torch.empty(LISTS_BYTES, dtype=torch.uint8, device=device)
        self._turns = Turns(
            [
                _Plan(PrefillModule(layer, cache, workspace, lists), rows, limits.tokens)
                for _ in range(NUM_PLANS)
            ],
            device,
        )
        with self._turns as plan:
            self._places = plan.prepare(0, NO_PREFILLS)  # of every plan
            self.module = plan.module  # which is planned, so it can be bound

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> None:
        with self._turns as plan:
            places = plan.prepare(num_decodes, prefills)
        assert places == self._places, "a plan that is not where captured launches look for it"


class _Arrays(NamedTuple):
    """The host's views of a plan's rows, int32."""

    indptrs: np.ndarray  # [2, most rows + 1]: of queries, of pages
    kv_lens: np.ndarray
    pages: np.ndarray


class _FixedRows:
    """A step's prefill rows on the device, always at the same addresses; rows beyond are empty.

    FA3 goes by `kv_lens`: lengths of last pages, which the call has too, are never filled.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        num_rows = limits.rows
        self._sizes = (num_rows + 1, num_rows + 1, num_rows, num_rows, limits.pages)
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
        end = len(pinned) - len(arrays.pages) + num_pages
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
