"""The default backend on CUDA: prefills by FlashInfer (FA3 on Hopper, else FA2), decodes by our
kernels.

decode   by kind of layer: balanced_decode if it supports the layer, one kernel for all that follows
         the projection; else rope_kv_write and paged_decode. They read block tables and positions
         on the device and need no plan, so a captured graph serves all steps.
prefill  planned on the host for each step and kind of layer (prefill.py), by rotating plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as cached

import torch

from asyncllm.attention.backend import AttendHeads, AttentionBackend
from asyncllm.attention.base import (
    Attend,
    AttendProjected,
    AttendRows,
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    RotatedHeads,
    Rotation,
)
from asyncllm.attention.flashinfer import api
from asyncllm.attention.flashinfer.prefill import PrefillPlan, prefill_backend, split_bytes
from asyncllm.attention.flashinfer.whole_steps import FlashInferSteps
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.layer_kinds import LayerKinds
from asyncllm.attention.rotating_buffers import RotatingBuffers
from asyncllm.kernels import balanced_decode, prefill_lists
from asyncllm.kernels.balanced_decode import MAX_ROWS, BalancedDecode
from asyncllm.kernels.declaration import num_sms
from asyncllm.kernels.paged_decode.kernel import paged_decode
from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write

PREFILL_HEAD_DIMS = (64, 128, 256)
NUM_PLANS = 2  # one of the running step, one of the step launched ahead


class FlashInferAttention(AttentionBackend):
    def __init__(
        self, cache: KVCache, layers: list[AttentionLayer], dtype: torch.dtype | None = None
    ) -> None:
        """dtype: of queries and outputs; None: that of the pages."""
        dtype = dtype or cache.layers[0].dtype
        for layer in layers:
            _check_supported(layer, dtype)
        super().__init__(cache)
        self._kinds = LayerKinds(layers, cache.group_of)
        device = cache.layers[0].device
        self._num_sms = num_sms(device)
        capability = torch.cuda.get_device_capability(device)
        num_bytes = split_bytes(self._kinds.layers, capability, self._num_sms, cache.is_fp8)
        self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # By kind; each waits for the compiler at its first call.
        self._balanced = [self._begin_balanced(layer) for layer in self._kinds.layers]
        plans = [PrefillPlan(self._kinds, cache, self._workspace, dtype) for _ in range(NUM_PLANS)]
        self._plans = RotatingBuffers(plans, device)

    def decode(self, rows: DecodeRows) -> Attend:
        decode_rotated = super().decode
        rotated = cached(lambda: decode_rotated(rows))  # shared by the layers that need it

        def bind(kind: int, group: int) -> Attend | AttendProjected:
            balanced = self._balanced_for(kind, rows.positions)
            if balanced is None:
                return rotated()
            return balanced.decode(rows.block_tables[group], rows.positions)

        from_projection = self._kinds.select(bind)

        def attend(
            layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
        ) -> torch.Tensor:
            call = rotated() if isinstance(qkv, RotatedHeads) else from_projection
            return call(layer, qkv, rotation)

        return attend

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
        write_slots: Sequence[torch.Tensor] | torch.Tensor,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slots = write_slots[self._cache.group_of[layer.index]]
        pages, scales = self._cache.layers[layer.index], self._cache.scales_of(layer.index)
        return rotate_and_write(layer, qkv, rotation, pages, slots, q, scales)

    def attend_decodes(self, rows: DecodeRows) -> AttendHeads:
        def attend(layer: AttentionLayer, q: torch.Tensor, out: torch.Tensor) -> None:
            tables = rows.block_tables[self._cache.group_of[layer.index]]
            kind = self._kinds.number_of[layer.index]
            self._bind_kind(kind, q, tables, rows.positions, out)(layer)

        return attend

    def bind_decodes(self, rows: DecodeRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        return self._kinds.select(
            lambda kind, group: self._bind_kind(
                kind, q, rows.block_tables[group], rows.positions, out
            )
        )

    def bind_prefills(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        with self._plans as plan:
            plan.prepare(rows)
        return plan.bind(q, out)

    def step_attention(self, max_tokens: int) -> FlashInferSteps | None:
        """Supported if all layers are of one kind and group, for FA3 and balanced_decode."""
        layer, device = self._kinds.layers[0], self._workspace.device
        capability, is_fp8 = torch.cuda.get_device_capability(device), self._cache.is_fp8
        is_fa3 = prefill_backend(capability, layer, is_fp8) == "fa3"
        if len(self._kinds.pairs) > 1 or api.get_batch_prefill_module is None or not is_fa3:
            return None
        if (balanced := self._balanced[0]()) is None:
            return None
        if (make_lists := prefill_lists.KERNEL.begin_loading(device)()) is None:
            return None
        return FlashInferSteps(
            layer, self._cache, self._workspace, balanced, max_tokens, make_lists
        )

    def _begin_balanced(self, layer: AttentionLayer) -> Callable[[], BalancedDecode | None]:
        """Start compiling balanced_decode for a kind of layer. The result waits for it, and returns
        None if the kernel does not support the layer."""
        pages, num_sms = self._cache.layers, self._num_sms
        dtype, device = pages[0].dtype, pages[0].device
        definitions = balanced_decode.definitions([layer], dtype, self._cache.block_size)
        loading = balanced_decode.KERNEL.begin_loading(device, definitions)

        @cached
        def wait() -> BalancedDecode | None:
            launch = loading()
            return None if launch is None else BalancedDecode(pages, layer, launch, num_sms)

        return wait

    def _balanced_for(self, kind: int, positions: torch.Tensor) -> BalancedDecode | None:
        return self._balanced[kind]() if len(positions) <= MAX_ROWS else None

    def _bind_kind(
        self,
        kind: int,
        q: torch.Tensor,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
    ) -> AttendRows:
        """Attention of rotated queries; keys and values are written already."""
        if (balanced := self._balanced_for(kind, positions)) is not None:
            return balanced.bind(q, block_tables, positions, out)
        pages, num_sms, cache = self._cache.layers, self._num_sms, self._cache

        def decode(layer: AttentionLayer) -> None:
            paged_decode(
                q,
                pages[layer.index],
                block_tables,
                positions,
                out,
                scale=layer.scale,
                window=layer.window,
                num_sms=num_sms,
                soft_cap=layer.soft_cap,
                sinks=layer.sinks,
                kv_scales=cache.scales_of(layer.index),
                slopes=layer.slopes,
            )

        return decode


def _check_supported(layer: AttentionLayer, dtype: torch.dtype) -> None:
    """Raise `ValueError` for layers without a prefill kernel. Decode kernels support all others."""
    half = dtype in (torch.bfloat16, torch.float16)
    if not half or layer.head_dim not in PREFILL_HEAD_DIMS:
        raise ValueError(
            f"attention_backend flashinfer cannot prefill head_dim {layer.head_dim} in {dtype}: "
            "use --attention-backend torch"
        )
