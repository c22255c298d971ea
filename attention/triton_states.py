"""A `StateBackend` by Triton, for CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncllm.attention.base import PrefillRows
from asyncllm.attention.recurrence import new_output, tokens_of
from asyncllm.attention.state_cache import StateCache, pieces_of
from asyncllm.kernels.recurrent import kernel
from asyncllm.kernels.recurrent.kernel import Rows
from asyncllm.kernels.recurrent.records import Recur, Recurrence, StateLayer


@dataclass(frozen=True, slots=True)
class TritonStates:
    cache: StateCache

    def decode(self, slots: torch.Tensor) -> Recur:
        rows = Rows(slots)

        def recur(layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
            out = new_output(inputs)
            kernel.recur(inputs, self.cache.layers[layer.index], rows, out)
            return out

        return recur

    def mixed(self, decode_slots: torch.Tensor, prefills: PrefillRows) -> Recur:
        num_decodes, decodes = len(decode_slots), Rows(decode_slots)
        prompts = _rows_of(prefills, decode_slots.device)

        def recur(layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
            out, states = new_output(inputs), self.cache.layers[layer.index]
            kernel.recur(inputs, states, decodes, out)
            behind = tokens_of(inputs, slice(num_decodes, None))
            kernel.recur(behind, states, prompts, out[num_decodes:])
            return out

        return recur


def _rows_of(prefills: PrefillRows, device: torch.device) -> Rows:
    """The rows on the device, by one copy from pinned memory, which does not wait."""
    pieces = np.array(pieces_of(prefills), np.int32)
    indptr = np.searchsorted(pieces[:, 0], np.arange(len(prefills.slots) + 1))
    num_tokens = np.diff(prefills.query_indptr)
    columns = [
        prefills.slots,
        indptr,
        *pieces[:, 1:].T,
        np.repeat(np.arange(len(num_tokens)), num_tokens),
    ]
    on_host = torch.from_numpy(np.concatenate(columns).astype(np.int32))
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return Rows(*on_host.to(device, non_blocking=True).split([len(column) for column in columns]))
