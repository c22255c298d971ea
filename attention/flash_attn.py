"""Attention by the flash-attn package (FlashAttention 2): a second opinion on CUDA.

Its paged kernels take pages of a multiple of 256 tokens only, so it needs --block-size 256. Slower
than FlashInfer on Hopper; it reads the same KV layout. Tested with flash-attn 2.8.3.
"""

from __future__ import annotations

import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

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
from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write

PAGE_MULTIPLE = 256


class FlashAttnAttention:
    supports_graphs = True

    def __init__(self, cache: KVCache) -> None:
        if cache.block_size % PAGE_MULTIPLE:
            raise ValueError(
                f"attention_backend flash_attn needs block_size to be a multiple of "
                f"{PAGE_MULTIPLE}, not {cache.block_size}"
            )
        self._cache = cache

    def decode(self, rows: DecodeRows) -> Attend:
        write_slots = rows.write_slots(self._cache.block_size)

        def attend(
            layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
        ) -> torch.Tensor:
            slots = write_slots[self._cache.group_of[layer.index]]
            q = rotate_and_write(layer, qkv, rotation, self._cache.layers[layer.index], slots)
            return self._decode(layer, q, rows).flatten(1)

        return attend

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
        write_slots: torch.Tensor,
        q: torch.Tensor,
    ) -> None:
        slots = write_slots[self._cache.group_of[layer.index]]
        rotate_and_write(layer, qkv, rotation, self._cache.layers[layer.index], slots, q)

    def mixed(
        self,
        decodes: DecodeRows | None,
        prefills: PrefillRows,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> AttendRows:
        num_decodes = decodes.positions.shape[0] if decodes is not None else 0
        end = num_decodes + prefills.num_tokens
        tables = _upload(_padded_tables(prefills), q.device).unbind()
        query_indptr = _upload(prefills.query_indptr, q.device)
        kv_lens = prefills.kv_lens
        kv_indptr = _upload(np.concatenate([[0], kv_lens.cumsum()]).astype(np.int32), q.device)
        max_query = int(np.diff(prefills.query_indptr).max())

        def attend(layer: AttentionLayer) -> None:
            if decodes is not None:
                out[:num_decodes] = self._decode(layer, q[:num_decodes], decodes)
            out[num_decodes:end] = flash_attn_varlen_func(
                q[num_decodes:end],
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

    def step_attention(self, max_tokens: int) -> None:
        return None

    def _decode(self, layer: AttentionLayer, q: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        """q [rows, heads, head_dim] -> the same shape."""
        return flash_attn_with_kvcache(
            q.unsqueeze(1),
            *self._cache.keys_values[layer.index],
            cache_seqlens=rows.positions + 1,
            block_table=rows.block_tables[self._cache.group_of[layer.index]],
            softmax_scale=layer.scale,
            causal=True,
            window_size=_window(layer),
        ).squeeze(1)


def _window(layer: AttentionLayer) -> tuple[int, int]:
    """(left, right) as flash-attn counts: the token itself is not part of `left`."""
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
