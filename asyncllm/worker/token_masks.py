"""Token bitmasks of grammars, and their copy to the device.

There is one pinned buffer and one on the device, allocated at first use (16 KB per slot with 128k
tokens). One of each suffices, as a step's masks are written when all steps before are finished.
They are copied on a separate stream, during the forward pass of their step.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from asyncllm.kernels.records import LEAST_LOGIT as LEAST_LOGIT
from asyncllm.kernels.records import RowMasks as RowMasks

NO_MASK = -1  # the mask index of a row without a mask


class TokenMaskBuffer:
    """A buffer for `num_rows` masks over `vocab_size` tokens."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._num_words = num_rows, -(-vocab_size // 32)
        self._num_header = -(-num_rows // 4) * 4  # kernels need 16-byte alignment
        self._device = device

    @cached_property
    def _words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and device memory, the same tensor on a CPU: each row's mask index, then the masks,
        contiguous for a single copy."""
        size, dtype = self._num_header + self._num_rows * self._num_words, torch.int32
        is_gpu = self._device.type == "cuda"
        host = torch.full((size,), NO_MASK, dtype=dtype, pin_memory=is_gpu)
        if not is_gpu:
            return host, host
        self._stream = torch.cuda.Stream(self._device)
        self._copied = torch.Event(self._device)
        # Allocated on the stream that writes it: memory that the compute stream has just freed may
        # still be in use there.
        with torch.cuda.stream(self._stream):
            return host, torch.full((size,), NO_MASK, dtype=dtype, device=self._device)

    def _masks_in(self, words: torch.Tensor) -> RowMasks:
        bits = words[self._num_header :].view(self._num_rows, self._num_words)
        return RowMasks(words[: self._num_rows], bits)

    def host(self) -> np.ndarray:
        """The masks, int32 [num_rows, ceil(vocab_size / 32)], to be filled before `upload`."""
        array: np.ndarray = self._masks_in(self._words[0]).bits.numpy()
        return array

    def first(self, num_rows: int) -> RowMasks:
        """The device memory of masks for a step of `num_rows` rows, as captured graphs read it."""
        masks = self._masks_in(self._words[1])
        return RowMasks(masks.of_row[:num_rows], masks.bits)

    def upload(self, rows: np.ndarray, num_rows: int) -> RowMasks:
        """Copy the first masks of `host()`, one for each of `rows` of a step's `num_rows` rows.

        The result is valid on the current stream until the next upload.
        """
        assert "_words" in self.__dict__, "upload before the masks are written"
        host, on_device = self._words
        of_row = host.numpy()[:num_rows]
        of_row[:] = NO_MASK
        of_row[rows] = np.arange(len(rows), dtype=np.int32)
        if on_device is not host:
            num_words = self._num_header + len(rows) * self._num_words
            with self._stream:
                on_device[:num_words].copy_(host[:num_words], non_blocking=True)
                self._copied.record()
            self._copied.wait()  # the current stream waits: its sampling reads the masks
        masks = self._masks_in(on_device)
        return RowMasks(masks.of_row[:num_rows], masks.bits[: len(rows)])


def allows(masks: RowMasks, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whether masks allow each token in its row: bool [pairs]."""
    places = masks.of_row[rows]
    words = masks.bits[places.clamp(min=0).long(), (tokens // 32).long()]
    return (places < 0) | (words >> tokens % 32 & 1).bool()


def apply_masks_torch(logits: torch.Tensor, masks: RowMasks) -> None:
    """Set logits, f32 [rows, V], of tokens without a bit to -inf, in place."""
    is_masked = masks.of_row >= 0
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = masks.bits.unsqueeze(2) >> shifts  # [masked, words, 32]
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    allowed = allowed[masks.of_row.clamp(min=0)] | ~is_masked.unsqueeze(1)
    least = torch.where(is_masked, LEAST_LOGIT, float("-inf")).unsqueeze(1)
    logits.copy_(logits.clamp(min=least).masked_fill_(~allowed, float("-inf")))
