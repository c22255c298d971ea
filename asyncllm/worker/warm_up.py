"""Work on the padding slot, so that nobody's first request waits for what comes once.

Kernels are compiled and loaded at their first use. A variant that steps can meet and that is not
launched here, nor by `ModelRunner.run_padding` or a capture, is compiled while a request waits.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.kernels import SlotKernels
from asyncllm.worker.packed_step import NO_FEATURE
from asyncllm.worker.sampler import Sampler
from asyncllm.worker.slot_changes import RECORD_WORDS
from asyncllm.worker.token_masks import TokenMaskBuffer


def warm_up_slots(
    state: DeviceState,
    kernels: SlotKernels,
    masks: TokenMaskBuffer,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """A slot written and read, a row sampled in each way that no step of padding is. On the current
    stream. `dtype`: of the model's logits."""
    zero = torch.zeros(1, dtype=torch.int32, device=state.positions.device)
    record = torch.zeros(1, RECORD_WORDS, dtype=torch.int32, device=zero.device)
    kernels.write_slots(state, record, zero.expand(3, 1).contiguous())
    # Tables of this width: a kernel's variant, unless a graph has it already.
    tokens = TokenBuffers(zero, zero, zero, zero.long(), zero, zero)
    kernels.fill_decodes(state, zero, tokens, block_size)
    masks.host()[:1] = -1
    row_masks = masks.upload(np.zeros(1, np.int32), 1)
    sampler = Sampler(state, kernels.sample_slots, kernels.apply_masks)
    logits = torch.zeros(1, state.in_prompt.shape[1], dtype=dtype, device=zero.device)
    for positions in (zero, None):  # as after prefills, as after a decode step
        sampler.plain(logits, zero, positions, row_masks)
        sampler.full(logits, zero, positions, NO_FEATURE, None, row_masks)
