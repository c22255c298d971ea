"""A mixed step's tokens on the device, and the forward pass over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from asyncllm.attention.backend import AttentionBackend
from asyncllm.attention.base import (
    AttendRows,
    AttentionLayer,
    PrefillRows,
    RotatedHeads,
    Rotation,
    StepMixer,
    no_recurrence,
)
from asyncllm.kernels.recurrent.records import Recur
from asyncllm.models.base import CausalLM, TokenInputs


class TokenBuffers(NamedTuple):
    """The tokens of a mixed step, on the device: T tokens. All attention layers have one shape."""

    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    slots: torch.Tensor  # int32 [T], of each token's sequence
    write_slots: torch.Tensor  # int64 [groups, T], where KV is written; 0 is in the padding page
    q: torch.Tensor  # [T, num_heads, head_dim]
    out: torch.Tensor  # attention output, of the same shape

    @classmethod
    def zeros(
        cls,
        num_tokens: int,
        heads: tuple[int, int],
        num_groups: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TokenBuffers:
        """Buffers of zeros, which are valid inputs and outputs. heads: number and size of heads."""
        token_ids, positions, slots = torch.zeros(
            3, num_tokens, dtype=torch.int32, device=device
        ).unbind()
        write_slots = torch.zeros(num_groups, num_tokens, dtype=torch.int64, device=device)
        q, out = torch.zeros((2, num_tokens, *heads), dtype=dtype, device=device).unbind()
        return cls(token_ids, positions, slots, write_slots, q, out)

    def first(self, num_tokens: int) -> TokenBuffers:
        tokens = TokenBuffers(*(tensor[:num_tokens] for tensor in self))
        return tokens._replace(write_slots=self.write_slots[:, :num_tokens])


def forward(
    model: CausalLM,
    attention: AttentionBackend,
    tokens: TokenBuffers,
    prompt_lens: torch.Tensor | None,
    attend_rows: AttendRows,
    recur: Recur = no_recurrence,
) -> torch.Tensor:
    """The model's forward pass: hidden states [T, hidden_size].

    attend_rows: called with each layer, after its keys and values are written. prompt_lens: int32
    [T], if the model uses them.
    """
    out = tokens.out.flatten(1)

    def attend(
        layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
    ) -> torch.Tensor:
        attention.write(layer, qkv, rotation, tokens.write_slots, tokens.q)
        attend_rows(layer)
        return out

    inputs = TokenInputs(tokens.token_ids, tokens.positions, prompt_lens)
    return model.forward(inputs, StepMixer(attend, recur))


# (tokens, attention to call after each layer's write, whether tokens have adapters, recurrences):
# writes hidden states to the buffer of captured steps
Forward = Callable[[TokenBuffers, AttendRows, bool, Recur], object]
# (tokens, positions of decodes int32 [decodes], prefills) -> attention of rows from the host
BindAttention = Callable[[TokenBuffers, np.ndarray, PrefillRows], AttendRows]
