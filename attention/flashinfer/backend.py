"""Attention by FlashInfer (FA3 on Hopper or FA2 for prefills, XQA) and our own kernels.

decode   per kind of layer. One kernel of ours with all from the projection on: for one row
         fused_decode, beyond that balanced_decode where it can be. Else XQA, and
         paged_decode on GPUs and page sizes without that. They read block tables and
         positions on the device and need no plan, so a captured graph replays as it is.
prefill  planned on the host per step and kind (prefill.py), by plans in rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as cached
from functools import partial
from typing import NamedTuple

import torch

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
from asyncllm.attention.flashinfer.prefill import PrefillPlan, prefill_backend
from asyncllm.attention.flashinfer.whole_steps import FlashInferSteps
from asyncllm.attention.flashinfer.xqa import Xqa
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.layer_kinds import LayerKinds, choose_decode_kernels
from asyncllm.attention.rotating_buffers import RotatingBuffers
from asyncllm.kernels import balanced_decode, prefill_lists
from asyncllm.kernels.balanced_decode import MAX_ROWS, BalancedDecode
from asyncllm.kernels.declaration import num_sms
from asyncllm.kernels.fused_decode.kernel import FusedDecode
from asyncllm.kernels.paged_decode.kernel import paged_decode
from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write

WORKSPACE_BYTES = 128 << 20
PREFILL_HEAD_DIMS = (64, 128, 256)
FUSED_ROWS = 1  # steps of 8 and 16 rows were not faster so (docs/log/decode.md)
NUM_PLANS = 2  # steps that may be between plan and completion: one running, one launched ahead


class _KindKernels(NamedTuple):
    """The decode kernels of one kind of layers: the first that takes a step's rows does them."""

    fused: FusedDecode
    balanced: Callable[[], BalancedDecode | None]  # waits for the compiler, once
    # XQA's or Triton's: (q, block_tables, lengths, out), rotated; lengths uint32 [rows, 1].
    bind_lengths: Callable[..., AttendRows]


class FlashInferAttention:
    supports_graphs = True

    def __init__(self, cache: KVCache, layers: list[AttentionLayer]) -> None:
        self._cache = cache
        self._kinds = LayerKinds(layers, cache.group_of)
        device = cache.layers[0].device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._num_sms = num_sms(device)
        xqa = Xqa(cache, self._workspace, self._num_sms)
        self._kernels = [self._choose_kernels(layer, xqa) for layer in self._kinds.layers]
        plans = [PrefillPlan(self._kinds, cache, self._workspace) for _ in range(NUM_PLANS)]
        self._plans = RotatingBuffers(plans, device)

    def decode(self, rows: DecodeRows) -> Attend:
        rotated = cached(lambda: self._decode_rotated(rows))  # once for all that need it

        def bind(kind: int, group: int) -> AttendProjected:
            tables = rows.block_tables[group]
            decode = self._decode_from_projection(self._kernels[kind], tables, rows.positions)
            return decode or rotated()

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
        write_slots: torch.Tensor,
        q: torch.Tensor,
    ) -> None:
        slots = write_slots[self._cache.group_of[layer.index]]
        rotate_and_write(layer, qkv, rotation, self._cache.layers[layer.index], slots, q)

    def mixed(
        self,
        decodes: DecodeRows | None,
        prefills: PrefillRows,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> AttendRows:
        with self._plans as plan:
            plan.prepare(prefills)
        if decodes is None:
            return plan.bind(q[: prefills.num_tokens], out[: prefills.num_tokens])
        start = decodes.positions.shape[0]
        end = start + prefills.num_tokens
        prefill = plan.bind(q[start:end], out[start:end])
        decode = self._bind_decode(q[:start], decodes, out[:start])

        def attend(layer: AttentionLayer) -> None:
            decode(layer)
            prefill(layer)

        return attend

    def step_attention(self, max_tokens: int) -> FlashInferSteps | None:
        """For layers of one kind and cache group, which FA3 and balanced_decode do."""
        layer, device = self._kinds.layers[0], self._workspace.device
        is_fa3 = prefill_backend(torch.cuda.get_device_capability(device), layer) == "fa3"
        if len(self._kinds.pairs) > 1 or api.private is None or not is_fa3:
            return None
        if (balanced := self._kernels[0].balanced()) is None:
            return None
        if (make_lists := prefill_lists.KERNEL.begin_loading(device)()) is None:
            return None
        return FlashInferSteps(
            layer, self._cache, self._workspace, balanced, max_tokens, make_lists
        )

    def _choose_kernels(self, layer: AttentionLayer, xqa: Xqa) -> _KindKernels:
        cache, num_sms = self._cache, self._num_sms
        dtype, device = cache.layers[0].dtype, cache.layers[0].device
        _check_supported(layer, dtype)
        capability = torch.cuda.get_device_capability(device)
        names = choose_decode_kernels(layer, dtype, cache.block_size, capability).names
        is_balanced = names[0] == "balanced_decode"
        return _KindKernels(
            FusedDecode(layer, FUSED_ROWS, num_sms, device),
            _begin_balanced(layer, cache, num_sms) if is_balanced else lambda: None,
            xqa.bind if "xqa" in names else partial(_bind_triton, cache, num_sms),
        )

    def _decode_from_projection(
        self, kernels: _KindKernels, tables: torch.Tensor, positions: torch.Tensor
    ) -> AttendProjected | None:
        """One kernel with all from the projection on, where there is one for so many rows."""
        fused = kernels.fused
        if not fused.takes(len(positions)):
            balanced = _balanced_for(kernels, positions)
            return None if balanced is None else balanced.decode(tables, positions)

        def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            cache = self._cache.layers[layer.index]
            return fused(layer, qkv, rotation, cache, tables, positions)

        return attend

    def _decode_rotated(self, rows: DecodeRows) -> Attend:
        """Two kernels: one rotates and writes, one attends."""
        write_slots = rows.write_slots(self._cache.block_size)
        lengths = cached(lambda: _lengths(rows))

        def attend(
            layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
        ) -> torch.Tensor:
            cache, group = self._cache.layers[layer.index], self._cache.group_of[layer.index]
            q = rotate_and_write(layer, qkv, rotation, cache, write_slots[group])
            out = torch.empty_like(q)
            kernels = self._kernels[self._kinds.number_of[layer.index]]
            tables = rows.block_tables[group]
            _bind_kind(kernels, q, tables, rows.positions, lengths, out)(layer)
            return out.flatten(1)

        return attend

    def _bind_decode(self, q: torch.Tensor, rows: DecodeRows, out: torch.Tensor) -> AttendRows:
        """Attention of rotated heads: q, out [rows, heads, head_dim], contiguous."""
        positions, lengths = rows.positions, cached(lambda: _lengths(rows))

        def bind(kind: int, group: int) -> AttendRows:
            tables = rows.block_tables[group]
            return _bind_kind(self._kernels[kind], q, tables, positions, lengths, out)

        return self._kinds.select(bind)


def _bind_kind(
    kernels: _KindKernels,
    q: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    lengths: Callable[[], torch.Tensor],
    out: torch.Tensor,
) -> AttendRows:
    """Attention of rotated heads, whose keys and values are written."""
    if (balanced := _balanced_for(kernels, positions)) is not None:
        return balanced.bind(q, block_tables, positions, out)
    return kernels.bind_lengths(q, block_tables, lengths(), out)


def _bind_triton(
    cache: KVCache,
    num_sms: int,
    q: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
) -> AttendRows:
    def decode(layer: AttentionLayer) -> None:
        paged_decode(
            q,
            cache.layers[layer.index],
            block_tables,
            lengths,
            out,
            scale=layer.scale,
            window=layer.window,
            num_sms=num_sms,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            slopes=layer.slopes,
        )

    return decode


def _begin_balanced(
    layer: AttentionLayer, cache: KVCache, num_sms: int
) -> Callable[[], BalancedDecode | None]:
    pages = cache.layers
    definitions = balanced_decode.definitions([layer], pages[0].dtype, cache.block_size)
    loading = balanced_decode.KERNEL.begin_loading(pages[0].device, definitions)

    @cached
    def wait() -> BalancedDecode | None:
        launch = loading()
        return None if launch is None else BalancedDecode(pages, layer, launch, num_sms)

    return wait


def _balanced_for(kernels: _KindKernels, positions: torch.Tensor) -> BalancedDecode | None:
    return kernels.balanced() if len(positions) <= MAX_ROWS else None


def _lengths(rows: DecodeRows) -> torch.Tensor:
    """uint32 [rows, 1], as XQA wants it: keys that each row sees, its own included."""
    return (rows.positions + 1).view(torch.uint32).unsqueeze(1)


def _check_supported(layer: AttentionLayer, dtype: torch.dtype) -> None:
    """Raise for what no prefill kernel can do; decodes have one for everything else."""
    half = dtype in (torch.bfloat16, torch.float16)
    if not half or layer.head_dim not in PREFILL_HEAD_DIMS:
        raise ValueError(
            f"attention_backend flashinfer cannot prefill head_dim {layer.head_dim} in {dtype}: "
            "use --attention-backend torch"
        )
