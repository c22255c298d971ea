"""One step as arrays: all that a worker is told of it, and nothing of requests.

A `PackedStep` holds numbers and typed records of arrays, no `Sequence` and no `SamplingParams`, so
that it can be written to a socket as it is. `StepPacker` (step_packer.py) makes it of a `StepPlan`.
The records are generic: of numpy arrays on the host, of tensors once they are on the device.
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
    """Bits of a number: sampling features beyond those of the captured sampler. Plain numbers: an
    `IntFlag` computes in Python."""

    EDIT = 1  # logit bias, bad words, min_tokens, tokens that are forced
    ALLOWED = 2
    LOGPROBS = 4
    MASK = 8  # a constraint's
    PROCESS = 16  # logits processors, of the request or of the engine


NO_FEATURE = 0
# What the sampler does plainly; logprobs are read from the logits beside it.
PLAIN = Feature.LOGPROBS | Feature.MASK


class SlotTokens(NamedTuple, Generic[A]):
    """Lists of tokens that slots get for those that they had before. All int32."""

    slots: A  # [lists]
    row_slots: A  # [tokens]: the slot of each
    tokens: A


class LogitEdits(NamedTuple, Generic[A]):
    """Additions to logits, and tokens that are forced. int32 but `values`."""

    rows: A  # [edits]
    tokens: A
    values: A  # f32 [edits]
    forced_rows: A  # [forced]
    forced_tokens: A


class SamplingExtras(NamedTuple, Generic[A]):
    """Inputs of sampling that few steps have; None: this one has none."""

    prompt_tokens: SlotTokens[A] | None = None  # of sequences with penalties, each token once
    output_tokens: SlotTokens[A] | None = None  # of the same
    allowed: SlotTokens[A] | None = None  # of slots that have a list, or had one before
    edits: LogitEdits[A] | None = None
    logprob_ids: A | None = None  # int32 [rows, ids]: tokens that rows named for logprobs
    prompt_targets: A | None = None  # int32: of all rows with prompt logprobs, one after another


DeviceExtras = SamplingExtras[torch.Tensor]
NO_EXTRAS: SamplingExtras[np.ndarray] = SamplingExtras()
NO_DEVICE_EXTRAS: DeviceExtras = SamplingExtras()


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Sequences that take slots, and new entries of block tables; None: the step has none."""

    records: np.ndarray | None = None  # int32 [n, RECORD_WORDS] (slot_changes.py)
    # int32 [3, m]: tables (group * slots + slot), indices, pages
    entries: np.ndarray | None = None

    def split(self, max_records: int, max_entries: int) -> list[SlotChanges]:
        """In order, pieces of at most so many of each; at least one."""
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
class PromptLogprobs:
    """A prefill row that wants logprobs: of the prompt token that follows each of its tokens."""

    seq_id: int
    first_token: int  # in the step's token order
    num_targets: int
    num_top: int


TOKEN_STRIDE = 7919  # a prime: tokens of a padding step differ as far as the vocabulary goes
NO_ROWS = np.zeros(0, np.int32)
NO_PROMPTS = PrefillRows(np.zeros(1, np.int32), NO_ROWS, np.zeros(1, np.int32), NO_ROWS[None])


class PackedStep(NamedTuple):
    """D decodes, then P tokens of prompts; R rows sample. A tuple: one is made for each step, and a
    frozen dataclass takes three times as long."""

    decode_slots: np.ndarray  # int32 [D]
    decode_positions: np.ndarray  # int32 [D]
    sampled_slots: np.ndarray  # int32 [R]
    # The next three are of steps with prompts alone.
    # int32 [3 + groups, P]: ids, positions, slots; flat positions in each group's cache
    tokens: np.ndarray = NO_ROWS
    samples: np.ndarray = NO_ROWS  # int32 [3, R]: which of D + P tokens; slots; the new positions
    prefills: PrefillRows = NO_PROMPTS
    # Pages that change their place before the forward pass, in this order.
    swap_out: tuple[tuple[int, int], ...] = ()  # (device page, host page)
    page_copies: tuple[tuple[int, int], ...] = ()  # (from, to), both on the device
    swap_in: tuple[tuple[int, int], ...] = ()  # (host page, device page)
    states: StateMoves = NO_STATE_MOVES
    changes: SlotChanges = NO_CHANGES
    features: int = NO_FEATURE  # all that any row that samples needs
    extras: SamplingExtras[np.ndarray] = NO_EXTRAS
    num_top_logprobs: int | None = None  # the most that any row wants; None: none wants logprobs
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    needs_host: bool = False  # its sampling is launched later, when the tokens before it are known
    adapters: bool = False  # some token's sequence has one
    common: CommonStep | None = None  # of several engines, where they do it together
    num_padding: int = 0  # tokens that it has because of them

    @property
    def has_prompts(self) -> bool:
        return self.prefills is not NO_PROMPTS

    @property
    def shape(self) -> StepShape:
        """Not padded."""
        num_decodes, num_prompt_tokens = len(self.decode_slots), self.prefills.num_tokens
        kind = StepKind.of(num_decodes, num_prompt_tokens)
        return StepShape(kind, num_decodes + num_prompt_tokens, self.adapters)


def padding_prompt(
    num_tokens: int, block_size: int, num_groups: int = 1, vocab_size: int = 1
) -> PackedStep:
    """A step of one prompt, and its first token, on the padding page and slot.

    Its tokens differ as far as the vocabulary goes: equal ones would all take the same experts.
    """
    num_pages = -(-num_tokens // block_size)
    tokens = np.zeros((3 + num_groups, num_tokens), np.int32)
    tokens[0] = np.arange(num_tokens) * TOKEN_STRIDE % vocab_size
    tokens[1], tokens[2] = np.arange(num_tokens), PADDING_SLOT
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
