"""The device state of all sequences, indexed by slot; slot 0 is padding.

docs/ARCHITECTURE.md lists other tensors that outlive a step (input buffers, pages, workspaces).

All readers and writers run on one compute stream, in the order of the steps, so no tensor here
needs an event. S = slots (running sequences + 1), G = cache groups, P = pages per sequence,
V = vocabulary.

  tensor           dtype  shape      written by                    read by
  last_tokens      int32  [S]        init, sampler                 the next decode's embedding
  positions        int32  [S]        init, sampler                 RoPE, KV write, lengths, RNG
  prompt_lens      int32  [S]        init                          dynamic RoPE
  block_tables     int32  [G, S, P]  init, page appends            attention
  temperatures ..  f32    [S]        init                          sampler
  top_ks           int32  [S]        init                          sampler
  adapters         int32  [S]        init                          linear layers with adapters
  seeds            int64  [S]        init                          sampler
  output_counts    int32  [S, V]     init, inputs (if penalised)   penalties
  in_prompt        bool   [S, V]     init (if penalised)           repetition penalty
  allowed          bool   [S, V]     init (if restricted)          sampler; made on first use
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.attention.base import DecodeRows
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.worker.packed_step import SamplingExtras, SlotTokens

FLOAT_PARAMS = (
    "temperatures",
    "top_ps",
    "min_ps",
    "presence_penalties",
    "frequency_penalties",
    "repetition_penalties",
)


class DeviceState:
    def __init__(
        self,
        num_slots: int,
        pages_per_sequence: int,
        vocab_size: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.last_tokens = int32(num_slots)
        self.positions = int32(num_slots)
        self.prompt_lens = int32(num_slots)
        self.block_tables = int32(num_groups, num_slots, pages_per_sequence)
        # One tensor, so that a slot's parameters are copied at once; the views name its rows.
        self.float_params = torch.zeros(
            len(FLOAT_PARAMS), num_slots, dtype=torch.float32, device=device
        )
        self.temperatures, self.top_ps, self.min_ps = self.float_params[:3]
        self.presence_penalties, self.frequency_penalties = self.float_params[3:5]
        self.repetition_penalties = self.float_params[5]
        self.top_ks = int32(num_slots)
        self.adapters = int32(num_slots)  # adapter slots
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.output_counts = int32(num_slots, vocab_size)
        self.in_prompt = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self.allowed: torch.Tensor | None = None

    def apply(self, extras: SamplingExtras[torch.Tensor]) -> None:
        """Write the state that few sequences need: token counts for penalties, allowed tokens.
        A `WriteSlots` kernel writes the rest (slot_changes.py)."""
        if extras.prompt_tokens is not None:
            _set_true(self.in_prompt, extras.prompt_tokens)
        if extras.output_tokens is not None:
            slots, row_slots, tokens = extras.output_tokens
            self.output_counts.index_fill_(0, slots.long(), 0)
            places = row_slots, tokens
            self.output_counts.index_put_(places, torch.ones_like(tokens), accumulate=True)
        if extras.allowed is not None:
            if self.allowed is None:
                self.allowed = torch.zeros_like(self.in_prompt)
            _set_true(self.allowed, extras.allowed)

    @property
    def penalties(self) -> tuple[torch.Tensor, ...]:
        """Presence, frequency and repetition penalties, output counts, and tokens in the prompt."""
        params = (self.presence_penalties, self.frequency_penalties, self.repetition_penalties)
        return *params, self.output_counts, self.in_prompt

    def count_inputs(self, slots: torch.Tensor) -> None:
        """Count each slot's last token, the input of a decode step, as output; once per step. It is
        final only now, as a step that is sampled again may choose another token."""
        places = slots, self.last_tokens[slots]
        self.output_counts.index_put_(places, self.is_penalised(slots).int(), accumulate=True)

    def is_penalised(self, slots: torch.Tensor) -> torch.Tensor:
        """Which slots have penalties: bool, False for the padding slot."""
        presence, frequency = self.presence_penalties[slots], self.frequency_penalties[slots]
        is_penalised = (presence != 0) | (frequency != 0) | (self.repetition_penalties[slots] != 1)
        return is_penalised & (slots != 0)

    def advance(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Write each slot's sampled token, and the position at which it will be computed.

        All padding rows write slot 0, whose position stays 0.
        """
        self.last_tokens[slots] = tokens.clamp(min=0)  # NON_FINITE_TOKEN has no embedding
        self.positions[slots] = torch.where(slots == 0, 0, positions)


def _set_true(table: torch.Tensor, lists: SlotTokens[torch.Tensor]) -> None:
    """Set bool [slots, V] for these tokens of these slots and clear their others. Assigning a
    scalar, as in `[slots] = False`, would synchronise with the device."""
    table.index_fill_(0, lists.slots.long(), False)
    places = lists.row_slots, lists.tokens
    table.index_put_(places, torch.ones_like(lists.tokens, dtype=torch.bool))


# (state, slots int32 [rows]) -> the last tokens, int32 [rows], the positions of the tokens to
# sample, int32 [rows], and the rows of a decode step. Counts the inputs. Only enqueues; capturable.
GatherSlots = Callable[[DeviceState, torch.Tensor], tuple[torch.Tensor, torch.Tensor, DecodeRows]]


def gather_slots_torch(
    state: DeviceState, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, DecodeRows]:
    """The reference implementation of `GatherSlots`."""
    state.count_inputs(slots)
    rows = DecodeRows(state.block_tables[:, slots].unbind(), state.positions[slots])
    return state.last_tokens[slots], rows.positions + 1, rows


# (state, slots int32 [rows], token buffers, block_size) -> the decode rows of a mixed step. Fills
# the first tokens of the buffers, and counts them. A padding row (slot 0) leaves its token alone
# and has position -1. Only enqueues; capturable.
FillDecodes = Callable[[DeviceState, torch.Tensor, TokenBuffers, int], DecodeRows]


def fill_decodes_torch(
    state: DeviceState, slots: torch.Tensor, tokens: TokenBuffers, block_size: int
) -> DecodeRows:
    """The reference implementation of `FillDecodes`."""
    state.count_inputs(slots)
    first, is_valid = tokens.first(len(slots)), slots > 0
    rows = DecodeRows(state.block_tables[:, slots].unbind(), state.positions[slots])
    for buffer, values in (
        (first.token_ids, state.last_tokens[slots]),
        (first.positions, rows.positions),
        (first.slots, slots),
        *zip(first.write_slots, rows.write_slots(block_size), strict=True),
    ):
        buffer.copy_(torch.where(is_valid, values, buffer))
    return DecodeRows(rows.block_tables, torch.where(is_valid, rows.positions, -1))
