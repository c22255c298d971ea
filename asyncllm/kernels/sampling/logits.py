"""A row's logits in Triton: masks and penalties, and the noise by which a token is drawn."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.records import LEAST_LOGIT

LEAST: tl.constexpr = tl.constexpr(LEAST_LOGIT)


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


@triton.jit
def load_logits(row, token):
    """float32 logits of one row. -inf outside the vocabulary and where a mask forbids; what is not
    finite is +inf, behind a mask too: it must win, to be seen.

    row: pointer to its logits, size of the vocabulary, MASKED: whether any row of the step has a
    mask, whether this one has, pointer to its mask's words; its penalties.
    """
    row_ptr, vocab_size, MASKED, is_masked, words_ptr, penalties = row
    inside = (token >= 0) & (token < vocab_size)
    x = tl.load(row_ptr + token, inside, other=float("-inf")).to(tl.float32)
    if MASKED:  # noqa: SIM102 the compiler knows this one
        if is_masked:
            allowed = (tl.load(words_ptr + token // 32, inside, other=0) >> (token % 32)) & 1
            least = tl.where(x < LEAST, LEAST, x)
            is_bad = (x != x) | (x == float("inf"))
            x = tl.where(is_bad, float("inf"), tl.where(allowed != 0, least, float("-inf")))
    if penalties[0]:
        x = penalise(x, token, inside, penalties)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def gumbel_noise(token, seed, position):
    """As `sampler.gumbel_noise`, of one seed and position."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = _mix(low ^ _mix(high ^ _mix(position.to(tl.uint32))))
    bits = _mix(_mix(token.to(tl.uint32) + key) ^ _mix(key ^ 0x9E3779B9))
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    exponential = tl.where(u < 1e-3, u + 0.5 * u * u, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _mix(h):
    """MurmurHash3's 32-bit finaliser, as `sampler._mix`."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)
