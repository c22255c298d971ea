"""Sampling on the device: logits to tokens, with parameters per row.

There are two paths; the host knows which one the step's rows need:

  `SampleSlots`   masks, penalties, greedy, temperature, min-p, top-k, top-p; can be captured
  `sample_fully`  logits processors, allowed tokens and logit edits, then the same

Both update each slot's state with its new token.

A filter keeps all tokens at least as likely as a cutoff, so ties are kept or dropped together.
First min-p applies, then top-k, then top-p: the fewest of the remaining tokens whose probabilities,
renormalised, reach top_p.

Noise is a hash of (the sequence's seed, the position of the new token, the token id). So a seeded
request samples the same tokens whatever else is in its batch, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from asyncllm.types import NO_TOKEN_LEFT, NON_FINITE_TOKEN
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.packed_step import Feature, LogitEdits
from asyncllm.worker.token_masks import RowMasks, allows, apply_masks_torch

MASK32 = 0xFFFFFFFF
NOTHING = float("-inf")
FORBIDDING = Feature.ALLOWED | Feature.EDIT | Feature.PROCESS  # may leave a row without a token

# (state, logits [rows, V], slots int32 [rows], positions int32 [rows] or None, masks or None)
# -> sampled tokens int32 [rows]; updates the slots. Only enqueues; capturable.
# positions: of the tokens to sample; None: the slots have them already.
SampleSlots = Callable[
    [DeviceState, torch.Tensor, torch.Tensor, torch.Tensor | None, RowMasks | None], torch.Tensor
]
Process = Callable[[torch.Tensor], None]  # logits f32 [rows, V], in place


class LogprobTensors(NamedTuple):
    """Log-probabilities of `rows` positions, on the device."""

    logprobs: torch.Tensor  # f32 [rows], of the sampled token
    ranks: torch.Tensor  # int64 [rows], 1 = most likely
    top_ids: torch.Tensor  # int64 [rows, k]
    top_logprobs: torch.Tensor  # f32 [rows, k]
    named_logprobs: torch.Tensor | None = None  # f32 [rows, ids], of `logprob_token_ids`


def sample_fully(
    sample: SampleSlots,
    state: DeviceState,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    features: int,
    edits: LogitEdits[torch.Tensor] | None,
    masks: RowMasks | None = None,
    process: Process | None = None,
) -> torch.Tensor:
    """Sampled tokens, int32 [rows], with all features that rows of the step need.

    NON_FINITE_TOKEN for a row with NaN or +inf, NO_TOKEN_LEFT if all its tokens are forbidden.
    """
    logits = logits.to(torch.float32, copy=True)
    if process is not None:
        process(logits)
    bad = _rows_not_finite(logits)  # before edits may hide it
    if features & Feature.ALLOWED:
        _mask_disallowed(logits, state, slots)
    if edits is not None:
        logits.index_put_((edits.rows, edits.tokens), edits.values, accumulate=True)
    tokens = sample(state, logits, slots, positions, masks)
    if features & FORBIDDING:
        tokens.masked_fill_(tokens == NON_FINITE_TOKEN, NO_TOKEN_LEFT)
    if edits is not None and len(edits.forced_rows):
        rows, forced = edits.forced_rows, edits.forced_tokens.int()
        if masks is not None:  # a grammar that does not allow the token takes precedence
            forced = torch.where(allows(masks, rows, forced), forced, tokens[rows])
        tokens.index_put_((rows,), forced)
        state.last_tokens.index_put_((slots[rows],), forced.clamp(min=0))
    tokens.masked_fill_(bad, NON_FINITE_TOKEN)
    return tokens


def _mask_disallowed(logits: torch.Tensor, state: DeviceState, slots: torch.Tensor) -> None:
    assert state.allowed is not None
    allowed = state.allowed[slots]
    unrestricted = ~allowed.any(dim=1, keepdim=True)
    logits.masked_fill_(~(allowed | unrestricted), NOTHING)


def penalise(logits: torch.Tensor, state: DeviceState, slots: torch.Tensor) -> None:
    """Apply penalties in place: repetition over prompt and output, frequency and presence over
    output, as in vLLM."""
    rows = state.is_penalised(slots).nonzero().squeeze(1)
    slots, x = slots[rows], logits[rows]
    counts = state.output_counts[slots]
    seen = state.in_prompt[slots] | (counts > 0)
    repetition = state.repetition_penalties[slots].unsqueeze(1)
    factor = torch.where(x > 0, 1.0 / repetition, repetition)
    x *= factor.masked_fill_(~seen, 1.0)
    x -= state.frequency_penalties[slots].unsqueeze(1) * counts
    x -= state.presence_penalties[slots].unsqueeze(1) * (counts > 0)
    logits.index_copy_(0, rows, x)


def gather_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, named: torch.Tensor | None = None
) -> LogprobTensors:
    """Log-probabilities by logits [rows, V] of one token per row, and of the `num_top` most likely.

    named: other token ids [rows, ids] to look up.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.long().clamp(min=0).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    top_logprobs, top_ids = logprobs.topk(num_top, dim=1)
    of_named = None if named is None else logprobs.gather(1, named.long())
    return LogprobTensors(chosen.squeeze(1), ranks, top_ids, top_logprobs, of_named)


def sample_slots_torch(
    state: DeviceState,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    masks: RowMasks | None,
) -> torch.Tensor:
    """The reference implementation of `SampleSlots`: argmax of filtered logits / temperature +
    Gumbel(seed, position, token).

    NON_FINITE_TOKEN for a row with NaN or +inf, or with nothing but -inf.
    """
    if positions is None:
        positions = state.positions[slots]
    scores = logits.to(torch.float32, copy=True)
    if masks is not None:
        apply_masks_torch(scores, masks)
    penalise(scores, state, slots)
    temperatures = state.temperatures[slots].unsqueeze(1)
    scores /= torch.where(temperatures > 0, temperatures, 1.0)
    _filter(scores, state, slots)
    noise = gumbel_noise(state.seeds[slots], positions, logits.shape[1])
    scores += torch.where(temperatures > 0, noise, 0.0)
    best, tokens = scores.max(dim=1)
    bad = best.isinf() | _rows_not_finite(logits)
    tokens = tokens.masked_fill(bad, NON_FINITE_TOKEN).int()
    state.advance(slots, tokens, positions)
    return tokens


def _filter(scores: torch.Tensor, state: DeviceState, slots: torch.Tensor) -> None:
    """Set scores that min-p, top-k or top-p drop to -inf, in place. Only rows with filters cost."""
    top_ks, top_ps, min_ps = state.top_ks[slots], state.top_ps[slots], state.min_ps[slots]
    is_filtered = (state.temperatures[slots] > 0) & ((top_ks > 0) | (top_ps < 1) | (min_ps > 0))
    rows = is_filtered.nonzero().squeeze(1)
    kept = scores[rows]
    kept.masked_fill_(kept < cutoffs(kept, top_ks[rows], top_ps[rows], min_ps[rows]), NOTHING)
    scores.index_copy_(0, rows, kept)


def cutoffs(
    scores: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """The smallest score to keep in each row: [rows, 1], from scores f32 [rows, V], by sorting."""
    ordered = scores.sort(dim=1, descending=True).values
    vocab_size = scores.shape[1]
    ranks = torch.where(top_ks > 0, top_ks.clamp(max=vocab_size), vocab_size).long()
    cutoff = torch.maximum(
        ordered[:, :1] + min_ps.unsqueeze(1).log(),  # p >= min_p * p_max; log(0) keeps everything
        ordered.gather(1, ranks.unsqueeze(1) - 1),
    )
    probs = ordered.masked_fill(ordered < cutoff, NOTHING).softmax(dim=1)
    is_needed = probs.cumsum(dim=1) - probs < top_ps.unsqueeze(1)
    num_kept = is_needed.sum(dim=1, keepdim=True).clamp(min=1)
    least_needed = torch.maximum(cutoff, ordered.gather(1, num_kept - 1))
    return torch.where(top_ps.unsqueeze(1) < 1, least_needed, cutoff)


def _rows_not_finite(logits: torch.Tensor) -> torch.Tensor:
    """Rows with NaN or +inf, even where masked: bool [rows]."""
    best = logits.amax(dim=1)  # NaN if there is one
    return best.isnan() | (best == float("inf"))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, f32 [rows, vocab_size], a pure function of its arguments.

    -log(E) with E = -log(1 - u) exponential and u in (0, 1) from 32 hashed bits. Small u have full
    relative precision in float32, and these make the large noise that decides.
    """
    low, high = seeds & MASK32, (seeds >> 32) & MASK32
    key = _mix(low ^ _mix(high ^ _mix(positions.long() & MASK32))).unsqueeze(1)
    token = torch.arange(vocab_size, device=seeds.device).unsqueeze(0)
    bits = _mix(_mix((token + key) & MASK32) ^ _mix(key ^ 0x9E3779B9))
    u = (bits.float() + 0.5) * 2.0**-32
    exponential = torch.where(u < 1e-3, u + 0.5 * u * u, -torch.log(1.0 - u))
    return -torch.log(exponential)


def _mix(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors that hold 32-bit values."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK32
    return h ^ (h >> 16)
