"""The bits that say which tokens may come next in some rows of a step, from the host to the logits.

One pinned buffer and its device twin, made on first use (16 KB a slot at 128k tokens). One of each
is enough: a step's masks are written when all steps before it are finished.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

# What a mask leaves alone when nothing that it allows is finite: whatever else forbids them (bad
# words, min_tokens), a grammar's only tokens stay possible. Far from what float32 can hold, because
# a small temperature multiplies it.
LEAST_LOGIT = -1e30

# (logits f32 [rows, V], int32 [masked] rows, int32 [masked, ceil(V / 32)] bits): in place
ApplyMasks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class TokenMaskBuffer:
    """Room for `num_rows` masks over `vocab_size` tokens."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, -(-vocab_size // 32))
        self._device = device
        self._host: torch.Tensor | None = None
        self._on_device: torch.Tensor | None = None

    def host(self) -> np.ndarray:
        """int32 [num_rows, ceil(vocab_size / 32)], to be written before `upload`."""
        if self._host is None:
            pinned = self._device.type == "cuda"
            self._host = torch.zeros(self._shape, dtype=torch.int32, pin_memory=pinned)
            self._on_device = self._host.to(self._device)
        array: np.ndarray = self._host.numpy()
        return array

    def upload(self, num_masks: int) -> torch.Tensor:
        """The first `num_masks` on the device: int32 [num_masks, ceil(vocab_size / 32)]."""
        assert self._host is not None and self._on_device is not None, "masks that nobody wrote"
        bits = self._on_device[:num_masks]
        if self._on_device is not self._host:  # the CPU reads them where they are
            bits.copy_(self._host[:num_masks], non_blocking=True)
        return bits


def apply_masks_torch(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """The reference `ApplyMasks`: -inf where the bit of a token is not set."""
    vocab_size = logits.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).flatten(1)[:, :vocab_size].bool()
    masked = logits[rows].clamp(min=LEAST_LOGIT).masked_fill(~allowed, float("-inf"))
    logits[rows] = masked
