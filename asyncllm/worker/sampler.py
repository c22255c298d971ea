"""From logits to tokens, on the device, per row of one batch.

Two ways, by what the step's rows need (known on the host):

  plain  masks, greedy and temperature: one argmax over logits / T + Gumbel noise, no sort
  full   processors, allowed tokens, edits, masks, penalties, temperature, min-p, top-k, top-p

Both leave each slot's state at its new token.

Randomness is a hash of (the sequence's seed, the position of the new token, the token id), so a
seeded request samples the same tokens whatever else is in its batch, and after any preemption.
Order of the full way as in vLLM: edits, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncllm.types import NO_TOKEN_LEFT, NON_FINITE_TOKEN
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.slot_sampling import Feature
from asyncllm.worker.token_masks import ApplyMasks, RowMasks, allows, apply_masks_torch

MASK32 = 0xFFFFFFFF
FORBIDDING = Feature.ALLOWED | Feature.EDIT | Feature.PROCESS  # may leave a row no token

# (logits [rows, V] any float dtype, temperatures, seeds, positions [rows]) -> int32 [rows]
PlainSample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (state, logits [rows, V], slots int32 [rows], positions int32 [rows] or None, masks or None)
# -> int32 [rows], sampled plainly by the slots' parameters; the slots have moved on to them.
# positions: of the tokens to be sampled, where the slots do not hold them already.
SampleSlots = Callable[
    [DeviceState, torch.Tensor, torch.Tensor, torch.Tensor | None, RowMasks | None], torch.Tensor
]
# (logits f32 [rows, V], top_ks int32, top_ps f32 [rows]) -> logits with the filtered at -inf
TopKTopP = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Process = Callable[[torch.Tensor], None]  # logits f32 [rows, V], in place


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Raw log-probabilities of `rows` positions, on the device."""

    logprobs: torch.Tensor  # f32 [rows], of the chosen token
    ranks: torch.Tensor  # int64 [rows], 1 = most likely
    top_ids: torch.Tensor  # int64 [rows, k]
    top_logprobs: torch.Tensor  # f32 [rows, k]
    named_logprobs: torch.Tensor | None = None  # f32 [rows, ids], of the tokens that were named


class Sampler:
    """positions: of the tokens to be sampled, int32 [rows]; None: the slots hold them already."""

    def __init__(
        self,
        state: DeviceState,
        plain: PlainSample,
        sample_slots: SampleSlots,
        top_k_top_p: TopKTopP,
        apply_masks: ApplyMasks,
    ) -> None:
        self._state = state
        self._plain = plain
        self._sample_slots = sample_slots
        self._top_k_top_p = top_k_top_p
        self._apply_masks = apply_masks

    def plain(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        masks: RowMasks | None = None,
    ) -> torch.Tensor:
        """int32 [rows]."""
        return self._sample_slots(self._state, logits, slots, positions, masks)

    def full(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        features: Feature,
        edits: Mapping[str, torch.Tensor],
        masks: RowMasks | None = None,
        process: Process | None = None,
    ) -> torch.Tensor:
        """int32 [rows], with every feature that any row of the step asks for.

        NON_FINITE_TOKEN for a row with a NaN or +inf, NO_TOKEN_LEFT where all are forbidden.
        """
        state = self._state
        if positions is None:
            positions = state.positions[slots]
        logits = logits.to(torch.float32, copy=True)
        if process is not None:
            process(logits)
        # Filters may search for ever in what is not finite: such rows go through them as zeros.
        bad = _rows_not_finite(logits)
        logits.masked_fill_(bad.unsqueeze(1), 0.0)
        self._edit(logits, slots, features, edits, masks)
        empty = None
        if features & FORBIDDING:
            empty = logits.amax(dim=1) == float("-inf")
            logits.masked_fill_(empty.unsqueeze(1), 0.0)
        temperatures = state.temperatures[slots]
        if features & Feature.FILTER:
            # The same scaled values decide the filter and the draw; greedy rows pass unchanged.
            random = temperatures > 0
            scaled = logits / torch.where(random, temperatures, 1.0).unsqueeze(1)
            filtered = self._filter(scaled, slots)
            logits = torch.where(random.unsqueeze(1), filtered, logits)
            temperatures = random.float()
        tokens = self._plain(logits, temperatures, state.seeds[slots], positions)
        if empty is not None:
            tokens.masked_fill_(empty, NO_TOKEN_LEFT)
        if "forced_rows" in edits:
            rows, forced = edits["forced_rows"], edits["forced_tokens"].int()
            if masks is not None:  # a grammar that knows no such token goes first
                forced = torch.where(allows(masks, rows, forced), forced, tokens[rows])
            tokens.index_put_((rows,), forced)
        tokens = tokens.masked_fill(bad, NON_FINITE_TOKEN)
        if features & Feature.PENALTY:
            ones = torch.ones_like(tokens)
            state.output_counts.index_put_((slots, tokens.clamp(min=0)), ones, accumulate=True)
        state.advance(slots, tokens, positions)
        return tokens

    def _edit(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        features: Feature,
        edits: Mapping[str, torch.Tensor],
        masks: RowMasks | None,
    ) -> None:
        """What forbids tokens or moves their logits, in place."""
        if features & Feature.ALLOWED:
            self._mask_disallowed(logits, slots)
        if features & Feature.EDIT:
            where = (edits["edit_rows"], edits["edit_tokens"])
            logits.index_put_(where, edits["edit_values"], accumulate=True)
        if masks is not None:
            self._apply_masks(logits, masks)
        if features & Feature.PENALTY:
            self._penalise(logits, slots)

    def _mask_disallowed(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        assert self._state.allowed is not None
        allowed = self._state.allowed[slots]
        unrestricted = ~allowed.any(dim=1, keepdim=True)
        logits.masked_fill_(~(allowed | unrestricted), float("-inf"))

    def _penalise(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Repetition over prompt and output; frequency and presence over output (as vLLM)."""
        state = self._state
        counts = state.output_counts[slots]
        seen = state.in_prompt[slots] | (counts > 0)
        repetition = state.repetition_penalties[slots].unsqueeze(1)
        factor = torch.where(logits > 0, 1.0 / repetition, repetition)
        logits *= factor.masked_fill_(~seen, 1.0)
        logits -= state.frequency_penalties[slots].unsqueeze(1) * counts
        logits -= state.presence_penalties[slots].unsqueeze(1) * (counts > 0)

    def _filter(self, scaled: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        state = self._state
        min_p = state.min_ps[slots].unsqueeze(1)
        # p >= min_p * p_max, in logits; log(0) = -inf keeps everything.
        floor = scaled.amax(dim=1, keepdim=True) + min_p.log()
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
        return self._top_k_top_p(scaled, state.top_ks[slots], state.top_ps[slots])


def gather_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, named: torch.Tensor | None = None
) -> LogprobTensors:
    """Log-probabilities under logits [rows, V] of one token per row, and of the `num_top` best.

    named: more token ids [rows, ids] to look up.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.long().clamp(min=0).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    top_logprobs, top_ids = logprobs.topk(num_top, dim=1)
    of_named = None if named is None else logprobs.gather(1, named.long())
    return LogprobTensors(chosen.squeeze(1), ranks, top_ids, top_logprobs, of_named)


def plain_sample_torch(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The reference `PlainSample`: argmax of logits / T + Gumbel(seed, position, token).

    NON_FINITE_TOKEN for a row with a NaN or +inf, or with nothing but -inf.
    """
    random = (temperatures > 0).unsqueeze(1)
    scale = torch.where(random, temperatures.unsqueeze(1), 1.0)
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    scores = logits.float() / scale + torch.where(random, noise, 0.0)
    scores = scores.masked_fill(scores.isnan(), float("inf"))
    best, tokens = scores.max(dim=1)
    return tokens.masked_fill(best.isinf(), NON_FINITE_TOKEN).int()


def sample_slots_torch(
    state: DeviceState,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    masks: RowMasks | None,
) -> torch.Tensor:
    """The reference `SampleSlots`."""
    if positions is None:
        positions = state.positions[slots]
    rows = state.temperatures[slots], state.seeds[slots], positions
    if masks is None:
        tokens = plain_sample_torch(logits, *rows)
    else:
        allowed = logits.to(torch.float32, copy=True)
        apply_masks_torch(allowed, masks)
        tokens = plain_sample_torch(allowed, *rows)
        tokens.masked_fill_(_rows_not_finite(logits), NON_FINITE_TOKEN)
    state.advance(slots, tokens, positions)
    return tokens


def _rows_not_finite(logits: torch.Tensor) -> torch.Tensor:
    """bool [rows]: which have a NaN or +inf, be it behind a mask."""
    best = logits.amax(dim=1)  # of a row with a NaN it is one
    return best.isnan() | (best == float("inf"))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """f32 [rows, vocab_size] standard Gumbel noise, a pure function of its arguments.

    -log(E) with E = -log(1 - u) exponential; u in (0, 1) from 32 hashed bits. Small u keep their
    relative precision in float32, and it is they that make the large noise that decides.
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


def top_k_top_p_torch(
    logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor
) -> torch.Tensor:
    """The reference `TopKTopP`, by sorting: top-k first, top-p over what is left.

    Ties at the k-th value all stay. The most likely token always stays.
    """
    sorted_logits, order = logits.sort(dim=1, descending=True)
    vocab_size = logits.shape[1]
    k = torch.where(top_ks > 0, top_ks.clamp(max=vocab_size), vocab_size).long()
    kth = sorted_logits.gather(1, (k - 1).unsqueeze(1))
    sorted_logits = sorted_logits.masked_fill(sorted_logits < kth, float("-inf"))
    probs = sorted_logits.softmax(dim=1)
    before = probs.cumsum(dim=1) - probs
    drop = (before >= top_ps.unsqueeze(1)) & (top_ps < 1).unsqueeze(1)
    drop[:, 0] = False
    sorted_logits = sorted_logits.masked_fill(drop, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, sorted_logits)
