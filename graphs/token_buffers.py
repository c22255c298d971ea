"""A mixed step's tokens on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
