"""Attention of latents (MLA) on CUDA, by our Triton kernel.

Decodes read their rows on the device and need no plan, so they can be captured. The rows of
prefills are copied to the device once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from asyncllm.attention.backend import AttendHeads, AttentionBackend
from asyncllm.attention.base import (
    AttendRows,
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    RotatedHeads,
    Rotation,
)
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.rotating_buffers import RotatingBuffers
from asyncllm.attention.uploaded_rows import RowsUpload
from asyncllm.kernels.declaration import num_sms
from asyncllm.kernels.latent_attention.kernel import attend_latents

NUM_UPLOADS = 2  # one of the running step, one of the step launched ahead


class _Rows(NamedTuple):
    """The rows' arguments of `attend_latents`."""

    pages: torch.Tensor
    page_indptr: torch.Tensor
    query_indptr: torch.Tensor
    lengths: torch.Tensor
    max_queries: int
    max_len: int


class LatentPages(AttentionBackend):
    """For layers with `latent_dim`, in one cache group and without a window."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        device = cache.layers[0].device
        self._num_sms = num_sms(device) if device.type == "cuda" else 1
        uploads = [RowsUpload(cache.block_size, device) for _ in range(NUM_UPLOADS)]
        self._uploads = RotatingBuffers(uploads, device)

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
        write_slots: Sequence[torch.Tensor] | torch.Tensor,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(qkv, RotatedHeads), "latents come rotated"
        latents = self._cache.layers[layer.index].view(-1, layer.head_dim)
        latents.index_copy_(0, write_slots[0], qkv.k.squeeze(1))
        return qkv.q.contiguous() if q is None else q.copy_(qkv.q)

    def attend_decodes(self, rows: DecodeRows) -> AttendHeads:
        (tables,) = rows.block_tables
        starts = torch.arange(len(rows.positions) + 1, dtype=torch.int32, device=tables.device)
        max_len = tables.shape[1] * self._cache.block_size
        page_indptr = starts * tables.stride(0)
        of_rows = _Rows(tables, page_indptr, starts, rows.positions + 1, 1, max_len)
        return lambda layer, q, out: self._attend(layer, q, out, of_rows)

    def bind_prefills(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        with self._uploads as upload:
            _, uploaded = upload(rows)
        of_rows = _Rows(
            uploaded.pages, uploaded.page_indptr, uploaded.query_indptr, uploaded.kv_lens,
            int(np.diff(rows.query_indptr).max()), int(rows.kv_lens.max()),
        )  # fmt: skip
        return lambda layer: self._attend(layer, q, out, of_rows)

    def _attend(
        self, layer: AttentionLayer, q: torch.Tensor, out: torch.Tensor, rows: _Rows
    ) -> None:
        attend_latents(
            layer, q, self._cache.layers[layer.index], rows.pages, rows.page_indptr,
            rows.query_indptr, rows.lengths, out, max_queries=rows.max_queries,
            max_len=rows.max_len, num_sms=self._num_sms,
        )  # fmt: skip
