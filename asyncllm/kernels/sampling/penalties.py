"""What the kernels of slots and samples do about penalties: `DeviceState.count_inputs` and
`sampler.penalise`, of one slot."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def open_penalties(slot, vocab_size, tensors):
    """A slot's penalties as `penalise` takes them.

    tensors: `DeviceState.penalties`, as pointers.
    """
    presences_ptr, frequencies_ptr, repetitions_ptr, counts_ptr, in_prompt_ptr = tensors
    presence = tl.load(presences_ptr + slot)
    frequency = tl.load(frequencies_ptr + slot)
    repetition = tl.load(repetitions_ptr + slot)
    repetition = tl.where(repetition > 0, repetition, 1.0)  # the padding slot's is 0
    is_penalised = (presence != 0) | (frequency != 0) | (repetition != 1)
    first = slot.to(tl.int64) * vocab_size
    return (
        is_penalised, presence, frequency, repetition, counts_ptr + first, in_prompt_ptr + first
    )  # fmt: skip


@triton.jit
def penalise(x, token, inside, penalties):
    """float32 logits of a penalised slot."""
    _, presence, frequency, repetition, counts_ptr, in_prompt_ptr = penalties
    counts = tl.load(counts_ptr + token, inside, other=0)
    is_seen = (counts > 0) | (tl.load(in_prompt_ptr + token, inside, other=0) != 0)
    factor = tl.where(x > 0, 1.0 / repetition, repetition)
    x = tl.where(is_seen, x * factor, x)
    return x - frequency * counts.to(tl.float32) - tl.where(counts > 0, presence, 0.0)


@triton.jit
def count_input(slot, token, vocab_size, tensors):
    """A slot's last token, by the program that reads it."""
    is_penalised, _, _, _, counts_ptr, _ = open_penalties(slot, vocab_size, tensors)
    if is_penalised:
        tl.store(counts_ptr + token, tl.load(counts_ptr + token) + 1)
