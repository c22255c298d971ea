"""What a model asks of attention, and what a backend is told about a step.

A model calls `attend(layer, q, k, v)` once per layer: it writes the new keys and values to their
pages and returns the attention output. Everything else (which rows, which pages, which kernel) was
settled before the forward pass by the backend, from an `AttentionBatch`. A model knows no pages.

Token order in a step: the decodes, one token each, then each prefill row's tokens in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one layer's attention. `window` counts the tokens seen, itself included."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class Attend(Protocol):
    """One step's attention, bound to its batch.

    q: [tokens, num_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim], rotated already.
    Returns [tokens, num_heads * head_dim]. Rows may be strided views (of a merged projection); the
    last two dimensions of each are contiguous.
    """

    def __call__(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prefill rows of a mixed step, on the host. Row i owns tokens indptr[i]:indptr[i+1]."""

    query_indptr: np.ndarray  # int32 [rows + 1]
    kv_lens: np.ndarray  # int32 [rows], this step's tokens included
    page_indptr: np.ndarray  # int32 [rows + 1]
    pages: np.ndarray  # int32 [page_indptr[-1]]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token each, on the device. Padding rows have table 0 and position 0."""

    block_tables: torch.Tensor  # int32 [rows, pages per sequence]
    positions: torch.Tensor  # int32 [rows]
    max_len: int | None = None  # longest context, where the host knows it (not under capture)

    def write_slots(self, block_size: int) -> torch.Tensor:
        """int64 [rows]: the flat KV position page * block_size + offset of each row's token."""
        positions = self.positions.long()
        pages = self.block_tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1)
        return pages.long() * block_size + positions % block_size


class AttentionBackend(Protocol):
    """Prepares one step's attention. All methods only enqueue device work."""

    supports_graphs: bool  # `decode` may be captured and replayed with other tensor contents

    def decode(self, rows: DecodeRows) -> Attend:
        """Attention for a step of decodes only."""
        ...

    def mixed(
        self, decodes: DecodeRows | None, prefills: PrefillRows, write_slots: torch.Tensor
    ) -> Attend:
        """Attention for decodes followed by prefills.

        write_slots: int64 [prefill tokens], flat KV positions page * block_size + offset.
        """
        ...
