"""One step as arrays: all that a worker is told of it, and nothing of requests.

A `PackedStep` holds numbers and typed records of arrays, no `Sequence` and no `SamplingParams`, so
that it can be written to a socket as it is. `StepPacker` (step_packer.py) makes it of a `StepPlan`.
The records are generic: of numpy arrays on the host, of tensors once they are on the device.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from asyncllm.attention.base import PrefillRows
from asyncllm.types import PADDING_PAGE, PADDING_SLOT

A = TypeVar("A", np.ndarray, torch.Tensor)


class Feature(enum.IntFlag):
    """Sampling features beyond those of the captured sampler."""

    EDIT = 1  # logit bias, bad words, min_tokens, tokens that are forced
    ALLOWED = 2
    LOGPROBS = 4
    MASK = 8  # a constraint's
    PROCESS = 16  # logits processors, of the request or of the engine


NO_FEATURE = Feature(0)
# What the sampler does plainly; logprobs are read from the logits beside it.
PLAIN = Feature.LOGPROBS | Feature.MASK


class PenaltyInit(NamedTuple, Generic[A]):
    """Token counts of sequences with penalties that take slots. All int32."""

    slots: A  # [sequences]
    prompt_slots: A  # [prompt tokens], each token once per slot
    prompt_tokens: A
    output_slots: A  # [output tokens]
    output_tokens: A


class AllowedInit(NamedTuple, Generic[A]):
    """Lists of allowed tokens of slots that have one, or had one before. All int32."""

    slots: A  # [slots], whose lists are replaced
    row_slots: A  # [tokens]
    tokens: A


class LogitEdits(NamedTuple, Generic[A]):
    """Additions to logits, and tokens that are forced. int64 but `values`."""

    rows: A  # [edits]
    tokens: A
    values: A  # f32 [edits]
    forced_rows: A  # [forced]
    forced_tokens: A


class SamplingExtras(NamedTuple, Generic[A]):
    """Inputs of sampling that few steps have; None: this one has none."""

    penalties: PenaltyInit[A] | None = None
    allowed: AllowedInit[A] | None = None
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
    entries: np.ndarray | None = None  # int32 [3, m]: slots, indices, pages

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


class PageMoves(NamedTuple):
    """Pages that change their place before the forward pass, in this order."""

    swap_out: tuple[tuple[int, int], ...] = ()  # (device page, host page)
    copies: tuple[tuple[int, int], ...] = ()  # (from, to), both on the device
    swap_in: tuple[tuple[int, int], ...] = ()  # (host page, device page)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A prefill row that wants logprobs: of the prompt token that follows each of its tokens."""

    seq_id: int
    first_token: int  # in the step's token order
    num_targets: int
    num_top: int


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step with prefills, D decodes and P tokens of prompts, and its R samples."""

    decode_slots: np.ndarray  # int32 [D]
    decode_positions: np.ndarray  # int32 [D]
    tokens: np.ndarray  # int32 [3, P]: positions, slots, ids
    write_slots: np.ndarray  # int32 [P]: flat KV positions
    samples: np.ndarray  # int32 [3, R]: which of the D + P tokens; slots; new tokens' positions
    prefills: PrefillRows
    adapters: bool = False  # some token's sequence has one

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + len(self.write_slots)

    @property
    def num_samples(self) -> int:
        return self.samples.shape[1]


class PackedStep(NamedTuple):
    """A tuple: one is made for each step, and a frozen dataclass takes three times as long."""

    moves: PageMoves
    changes: SlotChanges
    decode_slots: np.ndarray  # int32 [decodes]
    decode_positions: np.ndarray  # int32 [decodes]
    tokens: StepTokens | None  # of a step with prefills
    sampled_slots: np.ndarray  # int32 [rows that sample]
    features: Feature  # all that any of these rows needs
    extras: SamplingExtras[np.ndarray]
    num_top_logprobs: int | None  # the most that any row wants; None: no row wants logprobs
    prompt_logprobs: tuple[PromptLogprobs, ...]
    needs_host: bool  # its sampling is launched later, when the tokens before it are known
    adapters: bool  # some row's sequence has one


def padding_prompt(num_tokens: int, block_size: int) -> StepTokens:
    """A step of one prompt, and its first token, on the padding page and slot."""
    num_pages = -(-num_tokens // block_size)
    zeros = np.zeros(num_tokens, np.int32)
    return StepTokens(
        decode_slots=zeros[:0],
        decode_positions=zeros[:0],
        tokens=np.stack((np.arange(num_tokens, dtype=np.int32), zeros + PADDING_SLOT, zeros)),
        write_slots=zeros,
        samples=np.array([[num_tokens - 1], [PADDING_SLOT], [0]], np.int32),
        prefills=PrefillRows(
            query_indptr=np.array([0, num_tokens], np.int32),
            kv_lens=np.array([num_tokens], np.int32),
            page_indptr=np.array([0, num_pages], np.int32),
            pages=np.full(num_pages, PADDING_PAGE, np.int32),
        ),
    )
