"""The common part of attention backends: rows of one token first, then those of prompts.

A backend says how heads are rotated and written, how rows of one token attend, and how prompts do.
The runner calls `decode` where all of a step's rows have one token; else `write` and the result of
`mixed`, by turns for each layer, because a graph may hold the one and not the other.
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
    """Prepares one step's attention. All methods only enqueue device work."""

    supports_graphs = True  # `decode` and `write` may be captured and replayed with other contents

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
        """Rotated q [tokens, num_heads, head_dim], into `q` if there is one; keys and values to
        their pages.

        write_slots: int64 [groups, tokens], flat positions page * block_size + offset.
        """

    @abstractmethod
    def attend_decodes(self, rows: DecodeRows) -> AttendHeads:
        """Attention of rows of one token, to be called after each layer's `write`."""

    @abstractmethod
    def bind_prefills(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        """Attention of prompts from q to out, [their tokens, num_heads, head_dim]."""

    def bind_decodes(self, rows: DecodeRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        """As `attend_decodes`, where all layers have the same q and out."""
        attend = self.attend_decodes(rows)
        return lambda layer: attend(layer, q, out)

    def decode(self, rows: DecodeRows) -> Attend:
        """Attention for a step of decodes only."""
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
        """Attention for decodes followed by prefills, to be called after each layer's `write`.

        q, out: [tokens, num_heads, head_dim], the same for all layers. Tokens beyond the step's
        are padding and left alone.
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
        """For graphs of whole mixed steps of at most so many tokens, on the current stream; None:
        it has none."""
        return None


class NoAttention(AttentionBackend):
    """The backend of a model whose layers are all recurrent: nothing is called with a layer."""

    def write(self, layer: AttentionLayer, *_: Any, **__: Any) -> torch.Tensor:
        _never(layer)

    def attend_decodes(self, rows: DecodeRows) -> AttendHeads:
        return _never

    def bind_prefills(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        return _never


def _never(layer: AttentionLayer, *_: object) -> NoReturn:
    raise AssertionError(f"attention layer {layer.index} of a model that has none")
