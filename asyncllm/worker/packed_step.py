"""A step as arrays: all that a worker needs, without sequences or requests.

A `PackedStep` holds numbers and records of arrays, but no `Sequence` or `SamplingParams`, so it can
be sent over a socket. `StepPacker` (step_packer.py) makes one from a `StepPlan`. The records are
generic: they have numpy arrays on the host, and tensors on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from asyncllm.attention.base import PrefillRows
from asyncllm.step_plan import NO_STATE_MOVES, CommonStep, StateMoves, StepKind, StepShape
from asyncllm.types import PADDING_PAGE, PADDING_SLOT

A = TypeVar("A", np.ndarray, torch.Tensor)


class Feature:
    """Bit flags of sampling features that the captured sampler does not have. They are plain ints,
    as `IntFlag` is slow."""

    EDIT = 1  # logit bias, bad words, min_tokens, forced tokens
    ALLOWED = 2  # allowed_token_ids
    LOGPROBS = 4
    MASK = 8  # a grammar's
    PROCESS = 16  # logits processors, of the request or of the engine


NO_FEATURE = 0
# Features that do not need full sampling: logprobs are computed from the logits separately.
PLAIN = Feature.LOGPROBS | Feature.MASK


class SlotTokens(NamedTuple, Generic[A]):
    """A list of tokens for each of some slots, which replaces the slot's last list. All int32."""

    slots: A  # [lists]
    row_slots: A  # [tokens]: the slot of each token
    tokens: A


class LogitEdits(NamedTuple, Generic[A]):
    """Values to add to logits, and forced tokens. All int32 except `values`."""

    rows: A  # [edits]
    tokens: A
    values: A  # f32 [edits]
    forced_rows: A  # [forced]
    forced_tokens: A


class SamplingExtras(NamedTuple, Generic[A]):
    """Inputs of sampling that few steps have. None: not in this step."""

    prompt_tokens: SlotTokens[A] | None = None  # distinct ones, of sequences with penalties
    output_tokens: SlotTokens[A] | None = None  # of sequences with penalties
    allowed: SlotTokens[A] | None = None  # of slots that have such a list, or had one before
    edits: LogitEdits[A] | None = None
    logprob_ids: A | None = None  # int32 [rows, ids]: `logprob_token_ids`
    prompt_targets: A | None = None  # int32: targets of all rows with prompt logprobs, in order


DeviceExtras = SamplingExtras[torch.Tensor]
NO_EXTRAS: SamplingExtras[np.ndarray] = SamplingExtras()
NO_DEVICE_EXTRAS: DeviceExtras = SamplingExtras()


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Sequences that take slots, and new block table entries. None: not in this step."""

    records: np.ndarray | None = None  # int32 [n, RECORD_WORDS] (slot_changes.py)
    # int32 [3, m]: tables (group * slots + slot), indices, pages
    entries: np.ndarray | None = None

    def split(self, max_records: int, max_entries: int) -> list[SlotChanges]:
        """Pieces of at most this many records and entries, in order; at least one piece."""
        num_records = 0 if self.records is None else len(self.records)
        num_entries = 0 if self.entries is None else self.entries.shape[1]
        num_pieces = max(1, -(-num_records // max_records), -(-num_entries // max_entries))
        if num_pieces == 1:
            return [self]
        records, entries = self.records, self.entries
        return [
            SlotChanges(
                None if records is None else records[i * max_records :][:max_records],
                None if entries is None else entries[:, i * max_entries :][:, :max_entries],
            )
            for i in range(num_pieces)
        ]


NO_CHANGES = SlotChanges()


@dataclass(frozen=True, slots=True)
class PromptLogprobsRow:
    """A prefill row with prompt logprobs. Its targets are the prompt tokens after its tokens."""

    seq_id: int
    first_token: int  # in the step's token order
    num_targets: int
    num_top: int


TOKEN_STRIDE = 7919  # a prime, so that a padding step has as many different tokens as possible
NO_ROWS = np.zeros(0, np.int32)
NO_PROMPTS = PrefillRows(np.zeros(1, np.int32), NO_ROWS, np.zeros(1, np.int32), NO_ROWS[None])


class PackedStep(NamedTuple):
    """D decodes, then P prompt tokens; R rows sample. A tuple, as one is made per step and creating
    a frozen dataclass takes three times as long."""

    decode_slots: np.ndarray  # int32 [D]
    decode_positions: np.ndarray  # int32 [D]
    sampled_slots: np.ndarray  # int32 [R]
    # Only steps with prompts have the next three.
    # int32 [3 + groups, P]: ids, positions, slots, and flat positions in each group's cache
    tokens: np.ndarray = NO_ROWS
    samples: np.ndarray = NO_ROWS  # int32 [3, R]: token indices (of D + P), slots, new positions
    prefills: PrefillRows = NO_PROMPTS
    # Page moves before the forward pass, in this order.
    swap_out: tuple[tuple[int, int], ...] = ()  # (device page, host page)
    page_copies: tuple[tuple[int, int], ...] = ()  # (from, to), both on the device
    swap_in: tuple[tuple[int, int], ...] = ()  # (host page, device page)
    states: StateMoves = NO_STATE_MOVES
    changes: SlotChanges = NO_CHANGES
    features: int = NO_FEATURE  # of all rows that sample
    extras: SamplingExtras[np.ndarray] = NO_EXTRAS
    num_top_logprobs: int | None = None  # the largest of all rows; None: no row has logprobs
    prompt_logprobs: tuple[PromptLogprobsRow, ...] = ()
    needs_host: bool = False  # sampling is launched later, when the tokens before are known
    adapters: bool = False  # some row has a LoRA adapter
    common: CommonStep | None = None  # the step of all engines, if they share experts
    num_padding: int = 0  # tokens that were added for it

    @property
    def has_prompts(self) -> bool:
        return self.prefills is not NO_PROMPTS

    @property
    def shape(self) -> StepShape:
        """The step's own shape, without padding."""
        num_decodes, num_prompt_tokens = len(self.decode_slots), self.prefills.num_tokens
        kind = StepKind.of(num_decodes, num_prompt_tokens)
        return StepShape(kind, num_decodes + num_prompt_tokens, self.adapters)


def padding_prompt(
    num_tokens: int,
    block_size: int,
    num_groups: int = 1,
    vocab_size: int = 1,
    token_slot: int = PADDING_SLOT,
) -> PackedStep:
    """A prefill of one prompt on the padding page, which samples in the padding slot.

    Its tokens differ as far as possible: equal tokens would all use the same experts. token_slot:
    whose they are; where engines share experts, those of the padding slot use none.
    """
    num_pages = -(-num_tokens // block_size)
    tokens = np.zeros((3 + num_groups, num_tokens), np.int32)
    tokens[0] = np.arange(num_tokens) * TOKEN_STRIDE % vocab_size
    tokens[1], tokens[2] = np.arange(num_tokens), token_slot
    return PackedStep(
        decode_slots=NO_ROWS,
        decode_positions=NO_ROWS,
        sampled_slots=np.array([PADDING_SLOT], np.int32),
        tokens=tokens,
        samples=np.array([[num_tokens - 1], [PADDING_SLOT], [0]], np.int32),
        prefills=PrefillRows(
            query_indptr=np.array([0, num_tokens], np.int32),
            kv_lens=np.array([num_tokens], np.int32),
            page_indptr=np.array([0, num_pages], np.int32),
            pages=np.full((num_groups, num_pages), PADDING_PAGE, np.int32),
            slots=np.array([PADDING_SLOT], np.int32),
        ),
    )
