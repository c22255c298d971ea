"""The bits that say which tokens may come next in some rows of a step, from the host to the device.

One pinned buffer and its device twin, made on first use (16 KB a slot at 128k tokens). One of each
is enough: a step's masks are written when all steps before it are finished. They travel on a stream
of their own, beside the forward pass whose logits they are for.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from asyncllm.kernels.records import LEAST_LOGIT as LEAST_LOGIT
from asyncllm.kernels.records import RowMasks as RowMasks

NO_MASK = -1  # of a row that no mask restricts


class TokenMaskBuffer:
    """Room for `num_rows` masks over `vocab_size` tokens."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._num_words = num_rows, -(-vocab_size // 32)
        self._num_header = -(-num_rows // 4) * 4  # kernels want 16-byte alignment
        self._device = device

    @cached_property
    def _words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's place and then the masks, in one piece, which one copy takes: the host's, and
        the device's, on a CPU the same."""
        size, dtype = self._num_header + self._num_rows * self._num_words, torch.int32
        is_gpu = self._device.type == "cuda"
        host = torch.full((size,), NO_MASK, dtype=dtype, pin_memory=is_gpu)
        if not is_gpu:
            return host, host
        self._stream = torch.cuda.Stream(self._device)
        self._copied = torch.Event(self._device)
        # Memory of the stream that writes it: what the step's own stream has just let go of may
        # still be read there.
        with torch.cuda.stream(self._stream):
            return host, torch.full((size,), NO_MASK, dtype=dtype, device=self._device)

    def _masks_in(self, words: torch.Tensor) -> RowMasks:
        bits = words[self._num_header :].view(self._num_rows, self._num_words)
        return RowMasks(words[: self._num_rows], bits)

    def host(self) -> np.ndarray:
        """int32 [num_rows, ceil(vocab_size / 32)], to be written before `upload`."""
        array: np.ndarray = self._masks_in(self._words[0]).bits.numpy()
        return array

    def first(self, num_rows: int) -> RowMasks:
        """Where masks for so many rows of a step are, whatever their number, after an upload."""
        masks = self._masks_in(self._words[1])
        return RowMasks(masks.of_row[:num_rows], masks.bits)

    def upload(self, rows: np.ndarray, num_rows: int) -> RowMasks:
        """The first masks of `host()` for these of a step's `num_rows` rows, one each.

        Valid for work on the current stream until the next upload.
        """
        assert "_words" in self.__dict__, "masks that nobody wrote"
        host, on_device = self._words
        of_row = host.numpy()[:num_rows]
        of_row[:] = NO_MASK
        of_row[rows] = np.arange(len(rows), dtype=np.int32)
        if on_device is not host:  # the CPU reads them where they are
            num_words = self._num_header + len(rows) * self._num_words
            with self._stream:
                on_device[:num_words].copy_(host[:num_words], non_blocking=True)
                self._copied.record()
            self._copied.wait()  # the current stream, whose sampling reads them
        masks = self._masks_in(on_device)
        return RowMasks(masks.of_row[:num_rows], masks.bits[: len(rows)])


def allows(masks: RowMasks, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """bool [pairs]: whether each token may come in its row, as far as masks go."""
    places = masks.of_row[rows]
    words = masks.bits[places.clamp(min=0).long(), (tokens // 32).long()]
    return (places < 0) | (words >> tokens % 32 & 1).bool()


def apply_masks_torch(logits: torch.Tensor, masks: RowMasks) -> None:
    """In place, f32 [rows, V]: -inf where the bit of a token is not set."""
    is_masked = masks.of_row >= 0
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = masks.bits.unsqueeze(2) >> shifts  # [masked, words, 32]
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    allowed = allowed[masks.of_row.clamp(min=0)] | ~is_masked.unsqueeze(1)
    least = torch.where(is_masked, LEAST_LOGIT, float("-inf")).unsqueeze(1)
    logits.copy_(logits.clamp(min=least).masked_fill_(~allowed, float("-inf")))
