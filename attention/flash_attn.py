"""Attention by the flash-attn package (FlashAttention 2), an alternative on CUDA.

Its paged kernels need pages of a multiple of 256 tokens, so --block-size 256. It is slower than
FlashInfer on Hopper, and uses the same KV layout. Tested with flash-attn 2.8.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

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
from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write

PAGE_MULTIPLE = 256


class FlashAttnAttention(AttentionBackend):
    def __init__(self, cache: KVCache) -> None:
        if cache.block_size % PAGE_MULTIPLE:
            raise ValueError(
                f"attention_backend flash_attn needs block_size to be a multiple of "
                f"{PAGE_MULTIPLE}, not {cache.block_size}"
            )
        super().__init__(cache)

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
        write_slots: Sequence[torch.Tensor] | torch.Tensor,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slots = write_slots[self._cache.group_of[layer.index]]
        return rotate_and_write(layer, qkv, rotation, self._cache.layers[layer.index], slots, q)

    def attend_decodes(self, rows: DecodeRows) -> AttendHeads:
        lengths = rows.positions + 1

        def attend(layer: AttentionLayer, q: torch.Tensor, out: torch.Tensor) -> None:
            out[:] = flash_attn_with_kvcache(
                q.unsqueeze(1),
                *self._cache.keys_values[layer.index],
                cache_seqlens=lengths,
                block_table=rows.block_tables[self._cache.group_of[layer.index]],
                softmax_scale=layer.scale,
                causal=True,
                window_size=_window(layer),
            ).squeeze(1)

        return attend

    def bind_prefills(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        tables = _upload(_padded_tables(rows), q.device).unbind()
        query_indptr = _upload(rows.query_indptr, q.device)
        kv_lens = rows.kv_lens
        kv_indptr = _upload(np.concatenate([[0], kv_lens.cumsum()]).astype(np.int32), q.device)
        max_query = int(np.diff(rows.query_indptr).max())

        def attend(layer: AttentionLayer) -> None:
            out[:] = flash_attn_varlen_func(
                q,
                *self._cache.keys_values[layer.index],
                cu_seqlens_q=query_indptr,
                cu_seqlens_k=kv_indptr,
                max_seqlen_q=max_query,
                max_seqlen_k=int(kv_lens.max()),
                softmax_scale=layer.scale,
                causal=True,
                window_size=_window(layer),
                block_table=tables[self._cache.group_of[layer.index]],
            )

        return attend


def _window(layer: AttentionLayer) -> tuple[int, int]:
    """flash-attn's (left, right); the token itself is not part of `left`."""
    return (-1, -1) if layer.window is None else (layer.window - 1, 0)


def _padded_tables(rows: PrefillRows) -> np.ndarray:
    """int32 [groups, rows, most pages], padded with the padding page."""
    counts = np.diff(rows.page_indptr)
    tables = np.zeros((len(rows.pages), len(counts), counts.max()), np.int32)
    for row, count in enumerate(counts):
        tables[:, row, :count] = rows.pages[:, rows.page_indptr[row] :][:, :count]
    return tables


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
