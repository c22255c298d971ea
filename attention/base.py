"""The calls between a model and its attention, and a step's rows as a backend gets them.

A model calls `mixer.attend(layer, qkv, rotation)` once per layer, with the projection's output: it
normalises and rotates the heads, writes the new keys and values to their pages and returns the
attention output. That is one call because on a GPU all before the attention is one kernel. What
else there is (which rows, which pages) was settled before the forward pass. A model knows no pages.
Where a graph breaks at `attend`, the runner makes it of `write`, captured, and `mixed`, launched.

Token order in a step: the decodes, one token each, then each prefill row's tokens in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from asyncllm.kernels.records import Attend as Attend
from asyncllm.kernels.records import AttendProjected as AttendProjected
from asyncllm.kernels.records import AttendRows as AttendRows
from asyncllm.kernels.records import AttentionLayer as AttentionLayer
from asyncllm.kernels.records import DecodeRows as DecodeRows
from asyncllm.kernels.records import HeadNorm as HeadNorm
from asyncllm.kernels.records import RotatedHeads as RotatedHeads
from asyncllm.kernels.records import Rotation as Rotation
from asyncllm.kernels.recurrent.records import Recur, Recurrence, StateLayer


class Mixer(Protocol):
    """A model's access to the tokens before a step's, bound to the step's batch."""

    def attend(
        self, layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
    ) -> torch.Tensor:
        """As `Attend`."""
        ...

    def recur(self, layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
        """As `Recur`."""
        ...


def no_recurrence(layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
    """`Recur` for models without recurrent layers."""
    raise AssertionError(f"recurrent layer {layer.index} of a model that has none")


@dataclass(frozen=True, slots=True)
class StepMixer:
    """A `Mixer` of a step's two halves."""

    attend: Attend
    recur: Recur = no_recurrence


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prefill rows of a mixed step, on the host. Row i owns tokens indptr[i]:indptr[i+1]."""

    query_indptr: np.ndarray  # int32 [rows + 1]
    kv_lens: np.ndarray  # int32 [rows], this step's tokens included
    page_indptr: np.ndarray  # int32 [rows + 1]
    pages: np.ndarray  # int32 [groups, page_indptr[-1]], 0 behind a window
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # int32 [rows]
    # int32 [saves, 3]: row; tokens before the end of which its state is kept, of all the step's;
    # the row of the state memory. Ascending.
    saves: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))

    @property
    def num_tokens(self) -> int:
        return int(self.query_indptr[-1])


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
