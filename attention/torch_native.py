"""Attention in torch: the backend for CPUs, and the reference for all others.

It gathers each row's pages and calls scaled_dot_product_attention: decodes as one padded batch,
prefills row by row. It is written for clarity, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from asyncllm.attention.backend import AttendHeads, AttentionBackend
from asyncllm.attention.base import (
    AttendRows,
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    RotatedHeads,
    Rotation,
)
from asyncllm.attention.heads import rotated_heads


class TorchAttention(AttentionBackend):
    supports_graphs = False

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
        write_slots: Sequence[torch.Tensor] | torch.Tensor,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rotated, k, v = rotated_heads(layer, qkv, rotation)
        self._cache.write(layer.index, write_slots[self._cache.group_of[layer.index]], k, v)
        return rotated if q is None else q.copy_(rotated)

    def attend_decodes(self, rows: DecodeRows) -> AttendHeads:
        positions = rows.positions.unsqueeze(1)

        def attend(layer: AttentionLayer, q: torch.Tensor, out: torch.Tensor) -> None:
            tables = rows.block_tables[self._cache.group_of[layer.index]]
            if rows.max_len is not None:
                tables = tables[:, : -(-rows.max_len // self._cache.block_size)]
            keys, values = self._gather(layer, tables, q.dtype)  # padded to the longest row's
            out[:] = self._attention(layer, q.unsqueeze(2), keys, values, positions).squeeze(2)

        return attend

    def bind_prefills(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        page_tensors = torch.from_numpy(rows.pages).to(q.device)

        def attend(layer: AttentionLayer) -> None:
            of_group = page_tensors[self._cache.group_of[layer.index]]
            for row in range(len(rows.kv_lens)):
                start, end = rows.query_indptr[row : row + 2].tolist()
                first, last = rows.page_indptr[row : row + 2].tolist()
                pages, kv_len = of_group[first:last], int(rows.kv_lens[row])
                out[start:end] = self._attend_prefill(layer, q[start:end], pages, kv_len)

        return attend

    def _attend_prefill(
        self, layer: AttentionLayer, q: torch.Tensor, pages: torch.Tensor, kv_len: int
    ) -> torch.Tensor:
        """Attention of q [tokens, heads, dim], the last ones of kv_len positions, in the same
        shape."""
        keys, values = (x[:, :kv_len].unsqueeze(0) for x in self._gather(layer, pages, q.dtype))
        positions = torch.arange(kv_len - q.shape[0], kv_len, device=q.device).unsqueeze(0)
        out = self._attention(layer, q.transpose(0, 1).unsqueeze(0), keys, values, positions)
        return out.squeeze(0).transpose(0, 1)

    def _attention(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """`_attention` with the scales of an FP8 cache."""
        scales, index = self._cache.scales, layer.index
        if scales.keys[index] != 1:
            layer = replace(layer, scale=layer.scale * scales.keys[index])
        out = _attention(layer, q, keys, values, positions)
        scale = (scales.keys if layer.latent_dim is not None else scales.values)[index]
        return out if scale == 1 else out * scale

    def _gather(
        self, layer: AttentionLayer, pages: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of pages [..., pages]: [..., kv_heads, length, dim] each. The values
        of latents are the first latent_dim entries of their keys."""
        found = self._cache.read(layer.index, pages, dtype)
        if layer.latent_dim is not None:
            keys = values = found.unsqueeze(-2)
        else:
            keys, values = found.unbind(pages.dim())
        keys, values = (x.flatten(-4, -3).transpose(-3, -2) for x in (keys, values))
        return keys, values[..., : layer.latent_dim]


def _attention(
    layer: AttentionLayer,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of q [rows, heads, tokens, dim] at `positions` [rows, tokens], in the same
    shape. keys, values: [rows, kv_heads, length, dim]."""
    out = _of_values(layer, q, keys, values, positions)
    return out if layer.latent_dim is None else F.pad(out, (0, layer.head_dim - layer.latent_dim))


def _of_values(
    layer: AttentionLayer,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """As `_attention`, but [rows, heads, tokens, dim of values]."""
    index, position = torch.arange(keys.shape[2], device=q.device), positions.unsqueeze(2)
    seen = index <= position
    if layer.window is not None:
        seen &= index > position - layer.window
    seen = seen.unsqueeze(1)
    if layer.soft_cap is None and layer.sinks is None and layer.slopes is None:
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, scale=layer.scale, enable_gqa=True
        )
    group = layer.num_heads // layer.num_kv_heads
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = (q @ keys.mT).float() * layer.scale
    if layer.soft_cap is not None:
        scores = (scores / layer.soft_cap).tanh() * layer.soft_cap
    if layer.slopes is not None:
        distances = (index - position).unsqueeze(1)  # [rows, 1, tokens, length]
        scores = scores + layer.slopes[:, None, None] * distances
    scores = scores.masked_fill(~seen, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
