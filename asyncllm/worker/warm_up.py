"""Work on the padding page and slot, so that nobody's first request waits for what comes once.

Kernels are compiled and loaded at their first use. A variant that steps can meet and that is not
launched here, nor by a capture, is compiled while a request waits. All on the current stream.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncllm.attention.base import PrefillRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.models.base import CausalLM
from asyncllm.types import PADDING_PAGE
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.mixed_forward import MixedForward
from asyncllm.worker.sampler import Sampler
from asyncllm.worker.slot_sampling import Feature
from asyncllm.worker.token_masks import TokenMaskBuffer


class WarmUp:
    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        mixed_forward: MixedForward,
        state: DeviceState,
        sampler: Sampler,
        masks: TokenMaskBuffer,
    ) -> None:
        self._model = model
        self._cache = cache
        self._mixed_forward = mixed_forward
        self._state = state
        self._sampler = sampler
        self._masks = masks

    def prefill(self, num_tokens: int) -> None:
        """A step of one prompt, and its first token."""
        num_pages = -(-num_tokens // self._cache.block_size)
        prefills = PrefillRows(
            query_indptr=np.array([0, num_tokens], np.int32),
            kv_lens=np.array([num_tokens], np.int32),
            page_indptr=np.array([0, num_pages], np.int32),
            pages=np.full(num_pages, PADDING_PAGE, np.int32),
        )
        tokens = torch.zeros(num_tokens, dtype=torch.int32, device=self._state.positions.device)
        hidden = self._mixed_forward.run(
            tokens[:0],
            0,
            prefills,
            {
                "prefill_tokens": tokens,
                "prefill_positions": torch.arange(num_tokens, device=tokens.device),
                "prefill_prompt_lens": tokens + num_tokens,
                "write_slots": tokens,
            },
            self._mixed_forward.graph_of(0, prefills),
        )
        logits = self._model.compute_logits(hidden[num_tokens - 1 : num_tokens])
        self._sampler.plain(logits, tokens[:1], tokens[:1])  # of the padding slot

    def sampling(self, dtype: torch.dtype) -> None:
        """A row sampled in every other way. `dtype`: of the model's logits."""
        zero = torch.zeros(1, dtype=torch.int32, device=self._state.positions.device)
        vocab_size = self._state.in_prompt.shape[1]
        self._masks.host()[:1] = -1
        masks = self._masks.upload(np.zeros(1, np.int32), 1)
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=zero.device)
        for positions in (zero, None):  # as after prefills, as after a decode step
            self._sampler.plain(logits, zero, positions, masks)
            self._sampler.full(logits, zero, positions, Feature(0), {}, masks)
