"""The interface of attention backends, and what they share.

A backend defines how q, k and v are rotated and written, how decodes attend, and how prefills do.
The runner calls `decode` for decode steps. For mixed steps it alternates, per layer, between
`write` and the result of `mixed`, as a graph may capture the one and not the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from asyncllm.attention.base import (
    Attend,
    AttendRows,
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    RotatedHeads,
    Rotation,
    StepAttention,
)
from asyncllm.attention.kv_cache import KVCache

# Attention of one layer from q to out: [rows, num_heads, head_dim] each.
AttendHeads = Callable[[AttentionLayer, torch.Tensor, torch.Tensor], None]


class AttentionBackend(ABC):
    """Prepares the attention of a step. All methods only enqueue device work."""

    supports_graphs = True  # whether `decode` and `write` can be captured

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    @abstractmethod
    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
        write_slots: Sequence[torch.Tensor] | torch.Tensor,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to their pages. Returns the rotated queries
        [tokens, num_heads, head_dim], in `q` if it is given.

        write_slots: int64 [groups, tokens], flat positions page * block_size + offset.
        """

    @abstractmethod
    def attend_decodes(self, rows: DecodeRows) -> AttendHeads:
        """Attention of decodes, to be called after each layer's `write`."""

    @abstractmethod
    def bind_prefills(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        """Attention of prefills. q, out: [their tokens, num_heads, head_dim]."""

    def bind_decodes(self, rows: DecodeRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        """As `attend_decodes`, with the same q and out for all layers."""
        attend = self.attend_decodes(rows)
        return lambda layer: attend(layer, q, out)

    def decode(self, rows: DecodeRows) -> Attend:
        """Attention of a decode step."""
        write_slots, attend_rows = (
            rows.write_slots(self._cache.block_size),
            self.attend_decodes(rows),
        )

        def attend(
            layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
        ) -> torch.Tensor:
            q = self.write(layer, qkv, rotation, write_slots)
            out = torch.empty_like(q)
            attend_rows(layer, q, out)
            return out.flatten(1)

        return attend

    def mixed(
        self,
        decodes: DecodeRows | None,
        prefills: PrefillRows,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> AttendRows:
        """Attention of decodes followed by prefills, to be called after each layer's `write`.

        q, out: [tokens, num_heads, head_dim], the same for all layers. Tokens after the step's are
        padding and are not changed.
        """
        start = 0 if decodes is None else len(decodes.positions)
        end = start + prefills.num_tokens
        prefill = self.bind_prefills(prefills, q[start:end], out[start:end])
        if decodes is None:
            return prefill
        decode = self.bind_decodes(decodes, q[:start], out[:start])

        def attend(layer: AttentionLayer) -> None:
            decode(layer)
            prefill(layer)

        return attend

    def step_attention(self, max_tokens: int) -> StepAttention | None:
        """Attention for full graphs of mixed steps of up to `max_tokens`, on the current stream;
        None: not supported."""
        return None


class NoAttention(AttentionBackend):
    """The backend of a model without attention layers."""

    def write(self, layer: AttentionLayer, *_: Any, **__: Any) -> torch.Tensor:
        _never(layer)

    def attend_decodes(self, rows: DecodeRows) -> AttendHeads:
        return _never

    def bind_prefills(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        return _never


def _never(layer: AttentionLayer, *_: object) -> NoReturn:
    raise AssertionError(f"attention layer {layer.index} of a model that has none")
