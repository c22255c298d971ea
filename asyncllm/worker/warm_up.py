"""Work on the padding page and slot, so that nobody's first request waits for what comes once.

Kernels are compiled and loaded at their first use. A variant that steps can meet and that is not
launched here, nor by a capture, is compiled while a request waits. All on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from asyncllm.attention.base import PrefillRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.types import PADDING_PAGE, PADDING_SLOT
from asyncllm.worker.decode_rows import FillDecodes
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.sampler import Sampler
from asyncllm.worker.slot_changes import RECORD_WORDS, WriteSlots
from asyncllm.worker.slot_sampling import Feature
from asyncllm.worker.step_inputs import StepTokens
from asyncllm.worker.token_masks import TokenMaskBuffer


class WarmUp:
    def __init__(
        self,
        cache: KVCache,
        run_tokens: Callable[[StepTokens], None],
        state: DeviceState,
        fill_decodes: FillDecodes,
        write_slots: WriteSlots,
        sampler: Sampler,
        masks: TokenMaskBuffer,
    ) -> None:
        self._block_size = cache.block_size
        self._run_tokens = run_tokens
        self._state = state
        self._fill_decodes = fill_decodes
        self._write_slots = write_slots
        self._sampler = sampler
        self._masks = masks

    def prefill(self, num_tokens: int) -> None:
        """A step of one prompt, and its first token."""
        num_pages = -(-num_tokens // self._block_size)
        zeros = np.zeros(num_tokens, np.int32)
        self._run_tokens(
            StepTokens(
                decode_slots=zeros[:0],
                max_decode_len=0,
                tokens=np.stack((np.arange(num_tokens, dtype=np.int32), zeros + num_tokens, zeros)),
                write_slots=zeros.astype(np.int64),
                samples=np.array([[num_tokens - 1], [PADDING_SLOT], [0]], np.int32),
                prefills=PrefillRows(
                    query_indptr=np.array([0, num_tokens], np.int32),
                    kv_lens=np.array([num_tokens], np.int32),
                    page_indptr=np.array([0, num_pages], np.int32),
                    pages=np.full(num_pages, PADDING_PAGE, np.int32),
                ),
            )
        )

    def sampling(self, dtype: torch.dtype) -> None:
        """A slot written and read, a row sampled in every other way. `dtype`: of the model's
        logits."""
        zero = torch.zeros(1, dtype=torch.int32, device=self._state.positions.device)
        vocab_size = self._state.in_prompt.shape[1]
        self._masks.host()[:1] = -1
        masks = self._masks.upload(np.zeros(1, np.int32), 1)
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=zero.device)
        record = torch.zeros(1, RECORD_WORDS, dtype=torch.int32, device=zero.device)
        self._write_slots(self._state, record, zero.expand(3, 1).contiguous())
        # Tables of this width: a kernel's variant, unless a graph has it already.
        tokens = TokenBuffers(zero, zero, zero, zero.long(), zero, zero)
        self._fill_decodes(self._state, zero, tokens, self._block_size)
        for positions in (zero, None):  # as after prefills, as after a decode step
            self._sampler.plain(logits, zero, positions, masks)
            self._sampler.full(logits, zero, positions, Feature(0), {}, masks)
