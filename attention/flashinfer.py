"""Attention by FlashInfer: XQA for decodes, FA3 (Hopper) or FA2 for prefills.

The adapter to FlashInfer's attention: whatever it renames breaks here and nowhere else (0.6.12).

  decode   one row: one kernel of ours with all from the projection on (fused_decode.py).
           Beyond, XQA reads block tables and lengths on the device and needs no plan, so a captured
           graph replays as it is; as fast as the planned tensor-core kernel (docs/LOG.md). Cards
           and page sizes without XQA decode by triton_decode.py, which needs no plan either.
  prefill  the paged wrapper, planned on the host per step. plan() fills a pinned buffer that the
           device reads later; a step launched ahead must not overwrite it, so two wrappers take
           turns, each guarded by the event after its last plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncllm.attention.base import Attend, AttentionLayer, DecodeRows, PrefillRows, Rotation
from asyncllm.attention.flashinfer_import import flashinfer, xqa
from asyncllm.attention.fused_decode import FusedDecode
from asyncllm.attention.heads_kernel import rotate_and_write
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.triton_decode import paged_decode

WORKSPACE_BYTES = 128 << 20
SEMAPHORE_BYTES = 8 << 20  # XQA wants them zeroed once; it leaves them zero
PREFILL_HEAD_DIMS = (64, 128, 256)
XQA_CAPABILITIES = (9, 10, 12)
XQA_HEAD_DIMS = (64, 128, 256)
XQA_PAGE_SIZES = (16, 32, 64, 128)
FUSED_ROWS = 1  # beyond, XQA measured faster (docs/LOG.md)
NUM_PLANS = 2  # steps that may be between plan and completion: one running, one launched ahead


class FlashInferAttention:
    supports_graphs = True

    def __init__(self, cache: KVCache, layers: list[AttentionLayer]) -> None:
        self._cache = cache
        tensor = cache.layers[0]
        device = tensor.device
        _check_supported(cache, layers[0])
        self.uses_xqa = _xqa_supports(cache, layers[0])  # for decodes; else Triton
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._semaphores = torch.zeros(SEMAPHORE_BYTES // 4, dtype=torch.uint32, device=device)
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        windows = sorted({layer.window for layer in layers}, key=lambda w: w or 0)
        self._plans = [
            _PrefillPlan(layers[0], windows, tensor, self._workspace) for _ in range(NUM_PLANS)
        ]
        self._turn = 0
        self._fused = FusedDecode(layers[0], FUSED_ROWS, self._num_sms, device)

    def decode(self, rows: DecodeRows) -> Attend:
        if self._fused.takes(rows.positions.shape[0]):
            return self._decode_fused(rows)
        write_slots = rows.write_slots(self._cache.block_size)
        lengths = _lengths(rows)

        def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            cache = self._cache.layers[layer.index]
            q = rotate_and_write(layer, qkv, rotation, cache, write_slots)
            out = torch.empty_like(q)
            self._decode(layer, q, rows.block_tables, lengths, out)
            return out.flatten(1)

        return attend

    def _decode_fused(self, rows: DecodeRows) -> Attend:
        def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            cache = self._cache.layers[layer.index]
            return self._fused(layer, qkv, rotation, cache, rows.block_tables, rows.positions)

        return attend

    def mixed(
        self, decodes: DecodeRows | None, prefills: PrefillRows, write_slots: torch.Tensor
    ) -> Attend:
        self._turn = (self._turn + 1) % NUM_PLANS
        plan = self._plans[self._turn]
        plan.prepare(prefills)
        num_decodes, lengths = 0, None
        if decodes is not None:
            num_decodes = decodes.positions.shape[0]
            lengths = _lengths(decodes)
            write_slots = torch.cat([decodes.write_slots(self._cache.block_size), write_slots])

        def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            cache = self._cache.layers[layer.index]
            q = rotate_and_write(layer, qkv, rotation, cache, write_slots)
            out = torch.empty_like(q)
            if decodes is not None and lengths is not None:
                self._decode(
                    layer, q[:num_decodes], decodes.block_tables, lengths, out[:num_decodes]
                )
            plan.run(layer, q[num_decodes:], cache, out[num_decodes:])
            return out.flatten(1)

        return attend

    def _decode(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """q, out [rows, heads, head_dim], contiguous; lengths uint32 [rows, 1]."""
        cache = self._cache.layers[layer.index]
        if not self.uses_xqa:
            paged_decode(
                q,
                cache,
                block_tables,
                lengths,
                out,
                scale=layer.scale,
                window=layer.window,
                num_sms=self._num_sms,
            )
            return
        xqa(
            q.unsqueeze(1),
            cache[:, 0],
            cache[:, 1],
            block_tables,
            lengths,
            out.unsqueeze(1),
            self._workspace,
            self._semaphores,
            layer.num_kv_heads,
            self._cache.block_size,
            q_scale=layer.scale * layer.head_dim**0.5,  # XQA divides by sqrt(head_dim) itself
            sliding_win_size=layer.window or 0,
            kv_layout="NHD",
            sm_count=self._num_sms,
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


class _PrefillPlan:
    """One step's prefill: a wrapper per window, re-planned when its last copies have been read."""

    def __init__(
        self,
        layer: AttentionLayer,
        windows: list[int | None],
        cache: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        self._shape = _Shape(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale)
        self._dtype = cache.dtype
        self._block_size = cache.shape[2]
        hopper = torch.cuda.get_device_capability(cache.device)[0] == 9
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend="fa3" if hopper and window is None else "fa2"
            )
            for window in windows
        }
        self._copied = torch.cuda.Event()

    def prepare(self, rows: PrefillRows) -> None:
        # Done long ago: the step that used this plan was waited for before this one was planned.
        self._copied.synchronize()
        num_pages = np.diff(rows.page_indptr)
        last_page_lens = rows.kv_lens - (num_pages - 1) * self._block_size
        arrays = [rows.query_indptr, rows.page_indptr, rows.pages, last_page_lens]
        # Pinned, so that plan()'s copies to the device do not wait for it.
        pinned = [torch.from_numpy(a.astype(np.int32, copy=False)).pin_memory() for a in arrays]
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                *pinned,
                self._shape.num_heads,
                self._shape.num_kv_heads,
                self._shape.head_dim,
                self._block_size,
                causal=True,
                sm_scale=self._shape.scale,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        self._copied.record()

    def run(
        self, layer: AttentionLayer, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._wrappers[layer.window].run(q, cache, out=out)


def _lengths(rows: DecodeRows) -> torch.Tensor:
    """uint32 [rows, 1], as XQA wants it: keys that each row sees, its own included."""
    return (rows.positions + 1).view(torch.uint32).unsqueeze(1)


def _xqa_supports(cache: KVCache, layer: AttentionLayer) -> bool:
    return (
        torch.cuda.get_device_capability(cache.layers[0].device)[0] in XQA_CAPABILITIES
        and layer.head_dim in XQA_HEAD_DIMS
        and cache.block_size in XQA_PAGE_SIZES
    )


def _check_supported(cache: KVCache, layer: AttentionLayer) -> None:
    """What no prefill kernel can do; decodes have one for everything else."""
    dtype = cache.layers[0].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    if not half or layer.head_dim not in PREFILL_HEAD_DIMS:
        raise ValueError(
            f"attention_backend flashinfer cannot prefill head_dim {layer.head_dim} in {dtype}: "
            "use --attention-backend torch"
        )
