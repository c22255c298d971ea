"""Packs a step's slot changes on the host: sequences that take slots, and new block table entries.

A record per sequence and an entry per page make two arrays, which on a GPU one kernel applies
(kernels/slots), whatever the state of a slot consists of.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch

from asyncllm.step_plan import PageAppend, SlotInit
from asyncllm.worker.device_state import FLOAT_PARAMS, DeviceState
from asyncllm.worker.packed_step import NO_CHANGES, SlotChanges

MAX_INT32 = 2**31 - 1
LEAST_TOP_P = 1e-6  # less than the probability of the most likely token, but not 0 in float32

INTS = ("slot", "last_token", "position", "prompt_len", "top_k", "adapter")
FIRST_INT, FIRST_FLOAT = 2, 2 + len(INTS)  # indices of a record's 32-bit words
SLOT_INIT = np.dtype(
    [
        ("seed", np.int64),
        *((name, np.int32) for name in INTS),
        *((name, np.float32) for name in FLOAT_PARAMS),
    ]
)
RECORD_WORDS = SLOT_INIT.itemsize // 4
_RECORD = struct.Struct(f"=q{len(INTS)}i{len(FLOAT_PARAMS)}f")  # the same, but faster than numpy
# The seed is aligned in all records.
assert SLOT_INIT.itemsize == _RECORD.size and _RECORD.size % 8 == 0

# (state, records int32 [n, RECORD_WORDS], entries int32 [3, m]). Only enqueues; capturable. A
# record or entry of zeros writes to the padding slot what it has already.
WriteSlots = Callable[[DeviceState, torch.Tensor, torch.Tensor], None]


def pack_changes(
    inits: Sequence[SlotInit], appends: Sequence[PageAppend], num_slots: int
) -> SlotChanges:
    """NO_CHANGES if there are none. num_slots: including the padding slot."""
    if not inits and not appends:
        return NO_CHANGES
    if not inits:
        return SlotChanges(entries=_pack_entries(inits, appends, num_slots))
    records = np.frombuffer(b"".join([_record(init) for init in inits]), np.int32)
    entries = _pack_entries(inits, appends, num_slots)
    return SlotChanges(records.reshape(len(inits), RECORD_WORDS), entries)


def _record(init: SlotInit) -> bytes:
    params = init.seq.request.sampling_params
    return _RECORD.pack(
        init.seq.seed,
        init.slot,
        # A swapped-in sequence may decode at once, from its last token; a prefill ignores it.
        init.token_ids[-1],
        init.num_computed,
        init.seq.num_prompt_tokens,
        min(max(params.top_k, 0), MAX_INT32),
        init.seq.request.adapter_slot,
        0.0 if params.greedy else params.temperature,
        max(params.top_p, LEAST_TOP_P),
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )


def _pack_entries(
    inits: Sequence[SlotInit], appends: Sequence[PageAppend], num_slots: int
) -> np.ndarray:
    """New block table entries: int32 [3, entries] of tables, indices, pages."""
    tables = [append.group * num_slots + append.slot for append in appends]
    indices = [append.block_index for append in appends]
    pages = [append.block_id for append in appends]
    for init in inits:
        for group, block_ids in enumerate(init.block_ids):
            num_pages = len(block_ids)
            tables += [group * num_slots + init.slot] * num_pages
            indices += range(num_pages)
            pages += block_ids
    return np.array((tables, indices, pages), np.int32)


def write_slots_torch(state: DeviceState, records: torch.Tensor, entries: torch.Tensor) -> None:
    """The reference implementation of `WriteSlots`."""
    slots, *ints = records[:, FIRST_INT:FIRST_FLOAT].unbind(1)
    of_tokens = state.last_tokens, state.positions, state.prompt_lens
    tensors = *of_tokens, state.top_ks, state.adapters
    for tensor, values in zip(tensors, ints, strict=True):
        tensor[slots] = values
    state.seeds[slots] = records[:, :FIRST_INT].flatten().view(torch.int64)
    floats = records[:, FIRST_FLOAT : FIRST_FLOAT + len(FLOAT_PARAMS)].view(torch.float32)
    state.float_params[:, slots] = floats.T
    tables, indices, pages = entries
    state.block_tables.flatten(0, 1)[tables, indices] = pages
