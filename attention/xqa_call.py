"""XQA, FlashInfer's decode kernel, called for one layer.

The public call looks up on each call what one model never changes: 16 us, where the compiled
module's takes 6. A step that is launched layer by layer feels it. So with the version that was
tested its module is called with the arguments that the public call would pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.flashinfer_import import flashinfer, xqa
from asyncllm.attention.kv_cache import KVCache

TESTED_VERSION = "0.6.12"  # of get_xqa_module and what it gives
SEMAPHORE_BYTES = 8 << 20  # XQA wants them zeroed once; it leaves them zero


class Xqa:
    """`workspace` may be shared with what else runs on the stream."""

    def __init__(self, cache: KVCache, workspace: torch.Tensor, num_sms: int) -> None:
        self._keys_values = [(layer[:, 0], layer[:, 1]) for layer in cache.layers]
        self._block_size = cache.block_size
        self._dtype = cache.layers[0].dtype
        self._workspace = workspace
        self._semaphores = torch.zeros(
            SEMAPHORE_BYTES // 4, dtype=torch.uint32, device=workspace.device
        )
        self._num_sms = num_sms
        self._get_module: Callable[..., Any] | None = None
        if flashinfer.__version__ == TESTED_VERSION:
            self._get_module = importlib.import_module("flashinfer.xqa").get_xqa_module

    def __call__(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """q, out [rows, heads, head_dim], contiguous; lengths uint32 [rows, 1]."""
        q, out = q.unsqueeze(1), out.unsqueeze(1)
        keys, values = self._keys_values[layer.index]
        scale = layer.scale * layer.head_dim**0.5  # XQA divides by sqrt(head_dim) itself
        window = layer.window or 0
        if self._get_module is None:
            xqa(
                q, keys, values, block_tables, lengths, out, self._workspace, self._semaphores,
                layer.num_kv_heads, self._block_size, q_scale=scale, sliding_win_size=window,
                kv_layout="NHD", sm_count=self._num_sms,
            )  # fmt: skip
            return
        module = self._get_module(  # from its cache
            self._dtype, self._dtype, self._block_size, layer.head_dim,
            layer.num_heads // layer.num_kv_heads, window > 0, self._dtype, 1,
        )  # fmt: skip
        module.xqa(
            False, self._num_sms, layer.num_kv_heads, window, scale, out, 1.0, q,
            None, keys, values, None, None,  # no sinks, no scales of FP4
            block_tables, block_tables.shape[1] * self._block_size, lengths, q.shape[0], 1.0,
            self._semaphores, self._workspace, True, 1, None,  # PDL; one query token, no mask
        )  # fmt: skip
