"""XQA, FlashInfer's decode kernel, bound to a step's rows and called layer by layer.

The public call looks up on each call what one model never changes: 16 us, where the compiled
module's takes 6. A step that is launched layer by layer feels it. So the module is called with the
arguments that the public call would pass, where api.py finds it as it was tested, and what is the
same for all layers of a step is put together once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncllm.attention.base import AttendRows, AttentionLayer
from asyncllm.attention.flashinfer import api
from asyncllm.attention.kv_cache import KVCache

SEMAPHORE_BYTES = 8 << 20  # XQA wants them zeroed once; it leaves them zero


class Xqa:
    """`workspace` may be shared with what else runs on the stream."""

    def __init__(self, cache: KVCache, workspace: torch.Tensor, num_sms: int) -> None:
        self._keys_values = cache.keys_values
        self._block_size = cache.block_size
        self._dtype = cache.layers[0].dtype
        self._workspace = workspace
        self._semaphores = torch.zeros(
            SEMAPHORE_BYTES // 4, dtype=torch.uint32, device=workspace.device
        )
        self._num_sms = num_sms
        # By a layer's index: the module's function, and its first arguments.
        self._kernels: dict[int, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def bind(
        self, q: torch.Tensor, block_tables: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
    ) -> AttendRows:
        """q, out [rows, heads, head_dim], contiguous; lengths uint32 [rows, 1]."""
        q, out = q.unsqueeze(1), out.unsqueeze(1)
        if api.private is None:
            return self._bind_public(q, block_tables, lengths, out)
        after = (
            block_tables, block_tables.shape[1] * self._block_size, lengths, q.shape[0], 1.0,
            self._semaphores, self._workspace, True, 1, None,  # PDL; one query token, no mask
        )  # fmt: skip

        def call(layer: AttentionLayer) -> None:
            kernel = self._kernels.get(layer.index)
            run, before = kernel if kernel is not None else self._load(layer)
            keys, values = self._keys_values[layer.index]
            # No sinks, no scales of FP4.
            run(*before, out, 1.0, q, None, keys, values, None, None, *after)

        return call

    def _load(self, layer: AttentionLayer) -> tuple[Callable[..., None], tuple[Any, ...]]:
        assert api.private is not None
        window = layer.window or 0
        module = api.private.get_xqa_module(
            self._dtype, self._dtype, self._block_size, layer.head_dim,
            layer.num_heads // layer.num_kv_heads, window > 0, self._dtype, 1,
        )  # fmt: skip
        before = (False, self._num_sms, layer.num_kv_heads, window, _scale(layer))
        self._kernels[layer.index] = module.xqa, before
        return self._kernels[layer.index]

    def _bind_public(
        self, q: torch.Tensor, block_tables: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
    ) -> AttendRows:
        def call(layer: AttentionLayer) -> None:
            api.xqa(
                q, *self._keys_values[layer.index], block_tables, lengths, out, self._workspace,
                self._semaphores, layer.num_kv_heads, self._block_size, q_scale=_scale(layer),
                sliding_win_size=layer.window or 0, kv_layout="NHD", sm_count=self._num_sms,
            )  # fmt: skip

        return call


def _scale(layer: AttentionLayer) -> float:
    """XQA divides by sqrt(head_dim) itself."""
    return layer.scale * layer.head_dim**0.5
