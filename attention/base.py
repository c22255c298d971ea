"""The calls between a model and its attention, and a step's rows as a backend gets them.

A model calls `mixer.attend(layer, qkv, rotation)` once per layer, with the projection's output: it
normalises and rotates the heads, writes the new keys and values to their pages and returns the
attention output. That is one call because on a GPU all before the attention is one kernel. What
else there is (which rows, which pages) was settled before the forward pass. A model knows no pages.
Where a graph breaks at `attend`, the runner makes it of `write`, captured, and `mixed`, launched.

Token order in a step: the decodes, one token each, then each prefill row's tokens in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """RMSNorm over each head of q and of k, before the rotation. Weights: [head_dim]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary embedding of one step, NeoX style: entry i of a head pairs with i + head_dim / 2.

    rows: int32 or int64 [tokens], each token's row of cos_sin: float32 [rows, head_dim], the
    cosines in the first half, the sines in the second.
    """

    rows: torch.Tensor
    cos_sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one layer's attention. `window` counts the tokens seen, itself included."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    head_norm: HeadNorm | None = None


class Attend(Protocol):
    """One step's attention, bound to its batch.

    qkv: [tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous: the heads of q, of k, of v;
    may be overwritten. Returns [tokens, num_heads * head_dim].
    """

    def __call__(
        self, layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor: ...


class Mixer(Protocol):
    """A model's access to the tokens before a step's, bound to the step's batch."""

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """As `Attend`."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """A `Mixer` for models of which every layer is attention."""

    attend: Attend


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prefill rows of a mixed step, on the host. Row i owns tokens indptr[i]:indptr[i+1]."""

    query_indptr: np.ndarray  # int32 [rows + 1]
    kv_lens: np.ndarray  # int32 [rows], this step's tokens included
    page_indptr: np.ndarray  # int32 [rows + 1]
    pages: np.ndarray  # int32 [page_indptr[-1]]

    @property
    def num_tokens(self) -> int:
        return int(self.query_indptr[-1])


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token each, on the device. Padding rows have table 0 and position 0.

    In a graph of whole mixed steps (`StepAttention`) some are padding rows: their position is -1.
    """

    block_tables: torch.Tensor  # int32 [rows, pages per sequence]
    positions: torch.Tensor  # int32 [rows]
    max_len: int | None = None  # longest context, where the host knows it (not under capture)

    def write_slots(self, block_size: int) -> torch.Tensor:
        """int64 [rows]: the flat KV position page * block_size + offset of each row's token."""
        positions = self.positions.long()
        pages = self.block_tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1)
        return pages.long() * block_size + positions % block_size


# Attention of one layer over a mixed step's rows, from its q to its out (see `mixed`).
AttendRows = Callable[[AttentionLayer], None]


class StepAttention(Protocol):
    """Attention of mixed steps that a graph holds whole: what differs from step to step is read on
    the device, so that a captured launch serves them all.

    For steps of at most `max_decodes` decodes and `max_prefills` prefill rows, these with
    `max_pages` pages in all.
    """

    max_decodes: int
    max_prefills: int
    max_pages: int

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> None:
        """Set the next replay's prefill rows, which come after so many decodes."""
        ...

    def bind(self, decodes: DecodeRows | None, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        """To be called under capture, after each layer's `write`. q, out as `mixed` has them.

        decodes: as many rows as there may be, those that a step has first, the others' positions
        -1; None: for steps that have none.
        """
        ...


class AttentionBackend(Protocol):
    """Prepares one step's attention. All methods only enqueue device work."""

    supports_graphs: bool  # `decode` and `write` may be captured and replayed with other contents

    def decode(self, rows: DecodeRows) -> Attend:
        """Attention for a step of decodes only."""
        ...

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        rotation: Rotation,
        write_slots: torch.Tensor,
        q: torch.Tensor,
    ) -> None:
        """Rotated q into `q` [tokens, num_heads, head_dim]; keys and values to their pages.

        write_slots: int64 [tokens], flat KV positions page * block_size + offset.
        """
        ...

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
        ...

    def step_attention(self, max_tokens: int) -> StepAttention | None:
        """For graphs of whole mixed steps of at most so many tokens, on the current stream; None:
        it has none."""
        ...
