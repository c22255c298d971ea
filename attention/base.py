"""The interface between a model and its attention, and a step's rows as backends get them.

A model calls `mixer.attend(layer, qkv, rotation)` once per layer, with the output of the
projection. The call normalises and rotates heads, writes keys and values to their pages, and
returns the attention output. It is one call because on a GPU one kernel does all that precedes
attention. Rows and pages are bound before the forward pass, so the model does not know them. In
piecewise graphs `attend` consists of a captured `write` and a launched `mixed`.

Token order in a step: the decodes, one token each, then the tokens of each prefill row.
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
    """A model's access to KV cache and recurrent states, bound to a step's rows."""

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
    """A `Mixer` made of two functions."""

    attend: Attend
    recur: Recur = no_recurrence


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prefill rows of a mixed step, on the host. Row i has tokens indptr[i]:indptr[i+1]."""

    query_indptr: np.ndarray  # int32 [rows + 1]
    kv_lens: np.ndarray  # int32 [rows], including this step's tokens
    page_indptr: np.ndarray  # int32 [rows + 1]
    pages: np.ndarray  # int32 [groups, page_indptr[-1]]; 0 for blocks that a window has passed
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # int32 [rows]
    # State snapshots, int32 [saves, 3]: prefill row; end of its tokens among the step's prompt
    # tokens; row of the state memory. Ascending.
    saves: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))

    @property
    def num_tokens(self) -> int:
        return int(self.query_indptr[-1])


class StepAttention(Protocol):
    """Attention of mixed steps for full graphs. It reads a step's rows on the device, so a captured
    launch serves all steps of up to `max_decodes` decodes and `max_prefills` prefill rows with up
    to `max_pages` pages in total."""

    max_decodes: int
    max_prefills: int
    max_pages: int

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> None:
        """Set the prefill rows of the next replay, which come after `num_decodes` decodes."""
        ...

    def bind(self, decodes: DecodeRows | None, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        """Attention to be captured after each layer's `write`. q, out: as for `mixed`.

        decodes: the most decode rows of a step; unused rows come last and have position -1. None:
        for steps without decodes.
        """
        ...
