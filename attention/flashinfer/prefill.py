"""Prefill attention of a step by FlashInfer's paged kernels, FA3 on Hopper, FA2 elsewhere.

`prepare` plans on the host, `bind` returns the call for each layer. The planner and `prepare` fill
pinned buffers that the device reads later, so a step launched ahead must not use the same
`PrefillPlan`: there are two, in rotation (rotating_buffers.py).

FlashInfer's wrapper spends most of its time in Python: 145 to 290 us per plan and 17 us per run,
instead of 15 and 10 for the compiled module. So the module is called directly, with the arguments
that the wrapper would pass, if it has the tested version (api.py); else the wrapper is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch

from asyncllm.attention.base import AttendRows, AttentionLayer, PrefillRows
from asyncllm.attention.flashinfer import api
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.layer_kinds import LayerKinds
from asyncllm.attention.uploaded_rows import RowsUpload, RowTensors

WORKSPACE_BYTES = 8 << 20  # for a plan, as in the wrapper
LEAST_SPLIT_BYTES = 128 << 20  # for results of split KV, as FlashInfer's documents advise
SPLIT_ALIGNMENT = 16  # of each of the two allocations
MASK_CAUSAL = 1  # flashinfer.utils.MaskMode
LAYOUT_NHD = 0  # flashinfer.utils.TensorLayout
LN_2 = math.log(2)
MOST_FA3_HEAD_DIM = 128


# (layer, its keys, its values), [pages, block_size, kv_heads, head_dim] each
AttendPages = Callable[[AttentionLayer, torch.Tensor, torch.Tensor], Any]


class PrefillPlan:
    """A step's rows, planned for each kind of layer."""

    def __init__(
        self,
        kinds: LayerKinds,
        cache: KVCache,
        workspace: torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        """workspace: may be shared with other work on the stream. dtype: of queries; None: that of
        the pages."""
        self._cache = cache
        kernel = PublicWrapper if api.get_batch_prefill_module is None else PrefillModule
        self._kinds = kinds
        dtype = dtype or cache.layers[0].dtype
        self._kernels = [kernel(layer, cache, workspace, dtype) for layer in kinds.layers]
        self._upload = RowsUpload(cache.block_size, workspace.device)

    def prepare(self, rows: PrefillRows) -> None:
        host, device = self._upload(rows)
        for kernel in self._kernels:
            kernel.plan(host, device)

    def bind(self, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        """Attention of the planned rows. q, out: [their tokens, num_heads, head_dim]."""
        calls, number_of = [kernel.bind(q, out) for kernel in self._kernels], self._kinds.number_of
        keys_values = self._cache.keys_values

        def attend(layer: AttentionLayer) -> None:
            calls[number_of[layer.index]](layer, *keys_values[layer.index])

        return attend


class PrefillModule:
    """Calls FlashInfer's compiled module as its wrapper does, without the wrapper's checks."""

    def __init__(
        self,
        layer: AttentionLayer,
        cache: KVCache,
        workspace: torch.Tensor,
        dtype: torch.dtype,
        lists: torch.Tensor | None = None,
    ) -> None:
        """lists: the plan's part of the workspace, uint8; None: allocate one."""
        assert api.get_batch_prefill_module is not None
        self._layer = layer
        self._block_size = cache.block_size
        self._num_groups, self._group_of = cache.num_groups, cache.group_of
        self._cache, device = cache, workspace.device
        self._backend = _backend(layer, device, cache.is_fp8)
        self._module = api.get_batch_prefill_module(
            self._backend, dtype, cache.layers[0].dtype, dtype, torch.int32,
            layer.head_dim, layer.head_dim, position_mode(layer), layer.window is not None,
            layer.soft_cap is not None, False,  # no f16 accumulation
        )  # fmt: skip
        if lists is None:
            lists = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._workspaces = (workspace, lists)
        self._pdl = torch.cuda.get_device_capability(device)[0] >= 9
        self._info: Any = None
        self._rows: RowTensors | None = None

    def plan(self, host: RowTensors, device: RowTensors) -> None:
        layer, num_tokens = self._layer, int(host.query_indptr[-1])
        self._rows = device
        self._info = self._module.plan(
            *self._workspaces, self._pinned, host.query_indptr, host.page_indptr, host.kv_lens,
            num_tokens, len(host.kv_lens), layer.num_heads, layer.num_kv_heads, self._block_size,
            False, layer.head_dim, layer.head_dim, True, _window_left(layer),  # eager; causal
            *([-1, False, 0] if self._backend == "fa2" else []),  # splits KV as it likes
        )  # fmt: skip

    def follow(self, places: tuple[int, ...], pages: torch.Tensor) -> None:
        """Run FA3 with work lists that others fill, at these `places` of the workspace, instead of
        a plan.

        pages: int32, the pages of the lists' rows. FA3 reads nothing else of the rows.
        """
        assert self._backend == "fa3" and self._num_groups == 1
        self._info, self._rows = places, RowTensors(*(pages for _ in fields(RowTensors)))

    @cached_property
    def _pinned(self) -> torch.Tensor:
        return torch.empty(len(self._workspaces[1]), dtype=torch.uint8, pin_memory=True)

    def bind(self, q: torch.Tensor, out: torch.Tensor) -> AttendPages:
        assert self._rows is not None, "bind before plan"
        run, rows = self._module.paged_run, self._rows
        before = (*self._workspaces, self._info, q)
        lse, pages = _log_sums(self._layer, q), rows.pages.chunk(self._num_groups)
        after = (
            rows.last_page_lens, out, lse, MASK_CAUSAL, LAYOUT_NHD, _window_left(self._layer),
            self._pdl,
            *[None] * 2, self._layer.slopes, *[None] * 3,  # no custom masks, no items in a row
            self._layer.soft_cap or 0.0,
        )  # fmt: skip
        last = (*[None] * 3, 1.0, 1e4, 0, 0)  # scales of FA3, rotation and items, unused
        cache, scale = self._cache, self._layer.scale

        def call(layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
            of_group, (k_scale, v_scale) = (
                pages[self._group_of[layer.index]],
                cache.scales_of(layer.index),
            )
            lists = rows.query_indptr, rows.page_indptr, of_group
            run(*before, keys, values, *lists, *after, scale * k_scale, *last)
            _finish(layer, out, lse, v_scale)

        return call


class PublicWrapper:
    """Prefill attention by FlashInfer's public calls, with any version."""

    def __init__(
        self,
        layer: AttentionLayer,
        cache: KVCache,
        workspace: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        if layer.slopes is not None:  # these calls compute slopes themselves
            raise ValueError(
                f"attention_backend flashinfer does slopes (ALiBi) with version "
                f"{api.TESTED_VERSION} alone: pass torch"
            )
        self._layer = layer
        self._block_size = cache.block_size
        self._cache, self._dtype = cache, dtype
        self._group_of = cache.group_of
        backend = _backend(layer, workspace.device, cache.is_fp8)
        self._wrappers = [  # one per cache group, as a plan includes pages
            api.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
            for _ in range(cache.num_groups)
        ]

    def plan(self, host: RowTensors, device: RowTensors) -> None:
        layer = self._layer
        all_pages = host.pages.chunk(len(self._wrappers))
        for wrapper, pages in zip(self._wrappers, all_pages, strict=True):
            wrapper.plan(
                host.query_indptr, host.page_indptr, pages, host.last_page_lens,
                layer.num_heads, layer.num_kv_heads, layer.head_dim, self._block_size,
                causal=True, sm_scale=layer.scale, window_left=_window_left(layer),
                logits_soft_cap=layer.soft_cap, q_data_type=self._dtype,
                kv_data_type=self._cache.layers[0].dtype,
            )  # fmt: skip

    def bind(self, q: torch.Tensor, out: torch.Tensor) -> AttendPages:
        lse = _log_sums(self._layer, q)

        def call(layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
            wrapper = self._wrappers[self._group_of[layer.index]]
            k_scale, v_scale = self._cache.scales_of(layer.index)
            of_fp8 = {"k_scale": k_scale} if self._cache.is_fp8 else {}
            with_lse = lse is not None
            wrapper.run(q, (keys, values), out=out, lse=lse, return_lse=with_lse, **of_fp8)
            _finish(layer, out, lse, v_scale)

        return call


def _log_sums(layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor | None:
    """A buffer for the base-2 logarithm of each softmax's sum, float32 [tokens, heads]; None
    without sinks."""
    return None if layer.sinks is None else q.new_empty(q.shape[:2], dtype=torch.float32)


def _finish(
    layer: AttentionLayer, out: torch.Tensor, lse: torch.Tensor | None, v_scale: float
) -> None:
    """Apply the values' scale and sinks in place. A sink adds exp(sink) to the softmax's sum, which
    multiplies the output by sigmoid(log(sum) - sink)."""
    if v_scale != 1.0:
        out.mul_(v_scale)
    if lse is not None:
        assert layer.sinks is not None
        out.mul_((lse * LN_2 - layer.sinks).sigmoid_().unsqueeze(-1))


def position_mode(layer: AttentionLayer) -> int:
    """flashinfer.utils.PosEncodingMode: none, or ALiBi."""
    return 0 if layer.slopes is None else 2


def prefill_backend(
    capability: tuple[int, int], layer: AttentionLayer, is_fp8: bool = False
) -> str:
    """FlashInfer's name of the kernel for a layer. FA3 supports soft caps and heads of 256 too, but
    its module takes ten times as long to compile as FA2's; with FP8 pages it needs FP8 queries."""
    is_plain = layer.window is None and layer.soft_cap is None and layer.slopes is None
    is_common = is_plain and layer.head_dim <= MOST_FA3_HEAD_DIM and not is_fp8
    return "fa3" if capability[0] == 9 and is_common else "fa2"


def split_bytes(
    layers: Sequence[AttentionLayer], capability: tuple[int, int], num_sms: int, is_fp8: bool
) -> int:
    """Bytes of workspace that suffice for prefills of any of `layers` with split KV.

    The source is FlashInfer's PrefillPlan (scheduler.cuh): FA2 splits KV into at most as many tiles
    as two blocks per SM take at once, and keeps each one's output and log-sum-exp in float32.
    """
    num_bytes = LEAST_SPLIT_BYTES
    for layer in layers:
        if prefill_backend(capability, layer, is_fp8) == "fa2":
            num_tiles = 2 * num_sms // layer.num_kv_heads
            tile_rows = 128 if layer.head_dim < 256 else 64  # at most: FA2DetermineCtaTileQ
            rows = layer.num_heads * num_tiles * tile_rows
            num_bytes = max(num_bytes, rows * (layer.head_dim + 1) * 4 + 2 * SPLIT_ALIGNMENT)
    return num_bytes


def _backend(layer: AttentionLayer, device: torch.device, is_fp8: bool) -> str:
    return prefill_backend(torch.cuda.get_device_capability(device), layer, is_fp8)


def _window_left(layer: AttentionLayer) -> int:
    """FlashInfer's window_left: the token itself is not part of the window; -1: no window."""
    return -1 if layer.window is None else layer.window - 1
