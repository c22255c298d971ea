"""Attention of models whose layers all keep latents (MLA), by a Triton kernel of ours.

Decodes find their rows on the device and need no plan, so they are captured; the rows of prompts
are copied there once for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from asyncllm.attention.base import (
    Attend,
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

NUM_UPLOADS = 2  # steps that may be between upload and completion: one running, one launched ahead


class _Rows(NamedTuple):
    """As `attend_latents` takes them."""

    pages: torch.Tensor
    page_indptr: torch.Tensor
    query_indptr: torch.Tensor
    lengths: torch.Tensor
    max_queries: int
    max_len: int


class LatentPages:
    """An `AttentionBackend` for layers with `latent_dim`, of one cache group and without a
    window."""

    supports_graphs = True

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        device = cache.layers[0].device
        self._num_sms = num_sms(device) if device.type == "cuda" else 1
        uploads = [RowsUpload(cache.block_size, device) for _ in range(NUM_UPLOADS)]
        self._uploads = RotatingBuffers(uploads, device)

    def decode(self, rows: DecodeRows) -> Attend:
        (write_slots,) = rows.write_slots(self._cache.block_size)
        of_rows = self._decode_rows(rows)

        def attend(
            layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
        ) -> torch.Tensor:
            heads = self._write(layer, qkv, write_slots)
            q = heads.q.contiguous()
            out = torch.empty_like(q)
            self._attend(layer, q, out, of_rows)
            return out.flatten(1)

        return attend

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
        write_slots: torch.Tensor,
        q: torch.Tensor,
    ) -> None:
        q.copy_(self._write(layer, qkv, write_slots[0]).q)

    def mixed(
        self,
        decodes: DecodeRows | None,
        prefills: PrefillRows,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> AttendRows:
        start = 0 if decodes is None else len(decodes.positions)
        of_decodes = None if decodes is None else self._decode_rows(decodes)
        with self._uploads as upload:
            _, rows = upload(prefills)
        indptr, kv_lens = prefills.query_indptr, prefills.kv_lens
        of_prefills = _Rows(
            rows.pages, rows.page_indptr, rows.query_indptr, rows.kv_lens,
            int((indptr[1:] - indptr[:-1]).max()), int(kv_lens.max()),
        )  # fmt: skip
        end = start + prefills.num_tokens

        def attend(layer: AttentionLayer) -> None:
            if of_decodes is not None:
                self._attend(layer, q[:start], out[:start], of_decodes)
            self._attend(layer, q[start:end], out[start:end], of_prefills)

        return attend

    def step_attention(self, max_tokens: int) -> None:
        return None

    def _decode_rows(self, rows: DecodeRows) -> _Rows:
        (tables,) = rows.block_tables
        starts = torch.arange(len(rows.positions) + 1, dtype=torch.int32, device=tables.device)
        max_len = tables.shape[1] * self._cache.block_size
        page_indptr = starts * tables.stride(0)
        return _Rows(tables, page_indptr, starts, rows.positions + 1, 1, max_len)

    def _write(
        self, layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, slots: torch.Tensor
    ) -> RotatedHeads:
        assert isinstance(qkv, RotatedHeads), "latents come rotated"
        latents = self._cache.layers[layer.index].view(-1, layer.head_dim)
        latents.index_copy_(0, slots, qkv.k.squeeze(1))
        return qkv

    def _attend(
        self, layer: AttentionLayer, q: torch.Tensor, out: torch.Tensor, rows: _Rows
    ) -> None:
        attend_latents(
            layer, q, self._cache.layers[layer.index], rows.pages, rows.page_indptr,
            rows.query_indptr, rows.lengths, out, max_queries=rows.max_queries,
            max_len=rows.max_len, num_sms=self._num_sms,
        )  # fmt: skip
