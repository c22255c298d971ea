"""Attention by FlashInfer (FA3 on Hopper or FA2 for prefills, XQA) and our own kernels.

With xqa_call.py, flashinfer_prefill.py, flashinfer_steps.py, flashinfer_plans.py and
prefill_lists.py the adapter to FlashInfer's attention: whatever it renames breaks in these six and
nowhere else (0.6.12).

  decode   one kernel of ours with all from the projection on: of one row fused_decode.py, beyond
           balanced_decode.py where it can be. Else XQA, and triton_decode.py on cards and page
           sizes without that. They read block tables and positions on the device and need no
           plan, so a captured graph replays as it is.
  prefill  planned on the host per step (flashinfer_prefill.py), by plans that take turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.attention import prefill_lists
from asyncllm.attention.balanced_decode import MAX_ROWS, BalancedDecode, begin_loading
from asyncllm.attention.base import (
    Attend,
    AttendRows,
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    Rotation,
)
from asyncllm.attention.cuda_source import Launch
from asyncllm.attention.flashinfer_prefill import PrefillPlan
from asyncllm.attention.flashinfer_steps import FlashInferSteps, supports
from asyncllm.attention.fused_decode import FusedDecode
from asyncllm.attention.heads_kernel import rotate_and_write
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.triton_decode import paged_decode
from asyncllm.attention.turns import Turns
from asyncllm.attention.xqa_call import Xqa

WORKSPACE_BYTES = 128 << 20
PREFILL_HEAD_DIMS = (64, 128, 256)
XQA_CAPABILITIES = (9, 10, 12)
XQA_HEAD_DIMS = (64, 128, 256)
XQA_PAGE_SIZES = (16, 32, 64, 128)
FUSED_ROWS = 1  # steps of 8 and 16 rows were not faster so (docs/log/decode.md)
NUM_PLANS = 2  # steps that may be between plan and completion: one running, one launched ahead


class FlashInferAttention:
    supports_graphs = True

    def __init__(self, cache: KVCache, layers: list[AttentionLayer]) -> None:
        self._cache = cache
        self._layers = layers
        tensor = cache.layers[0]
        device = tensor.device
        _check_supported(cache, layers[0])
        capability = torch.cuda.get_device_capability(device)
        # For decodes; else Triton.
        self.uses_xqa = xqa_supports(capability, layers[0].head_dim, cache.block_size)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._xqa = Xqa(cache, self._workspace, self._num_sms)
        plans = [PrefillPlan(layers, cache, self._workspace) for _ in range(NUM_PLANS)]
        self._turns = Turns(plans, device)
        self._fused = FusedDecode(layers[0], FUSED_ROWS, self._num_sms, device)
        self._load_balanced: Callable[[], Launch | None] | None = begin_loading(layers, cache)
        self._balanced: BalancedDecode | None = None

    def decode(self, rows: DecodeRows) -> Attend:
        if self._fused.takes(rows.positions.shape[0]):
            return self._decode_fused(rows)
        if (balanced := self._get_balanced(rows)) is not None:
            return balanced.decode(rows)
        write_slots = rows.write_slots(self._cache.block_size)
        lengths = _lengths(rows)

        def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            cache = self._cache.layers[layer.index]
            q = rotate_and_write(layer, qkv, rotation, cache, write_slots)
            out = torch.empty_like(q)
            self._bind_unbalanced(q, rows.block_tables, lengths, out)(layer)
            return out.flatten(1)

        return attend

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        rotation: Rotation,
        write_slots: torch.Tensor,
        q: torch.Tensor,
    ) -> None:
        rotate_and_write(layer, qkv, rotation, self._cache.layers[layer.index], write_slots, q)

    def _decode_fused(self, rows: DecodeRows) -> Attend:
        def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            cache = self._cache.layers[layer.index]
            return self._fused(layer, qkv, rotation, cache, rows.block_tables, rows.positions)

        return attend

    def mixed(
        self,
        decodes: DecodeRows | None,
        prefills: PrefillRows,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> AttendRows:
        with self._turns as plan:
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
        """Where FA3 and balanced_decode do all layers."""
        balanced = self._wait_for_balanced()
        if balanced is None or not supports(self._layers, self._workspace.device):
            return None
        lists = prefill_lists.load(self._workspace.device)
        return FlashInferSteps(
            self._layers[0], self._cache, self._workspace, balanced, max_tokens, lists
        )

    def _bind_decode(self, q: torch.Tensor, rows: DecodeRows, out: torch.Tensor) -> AttendRows:
        """q, out [rows, heads, head_dim], contiguous."""
        if (balanced := self._get_balanced(rows)) is not None:
            return balanced.bind(q, rows.block_tables, rows.positions, out)
        return self._bind_unbalanced(q, rows.block_tables, _lengths(rows), out)

    def _bind_unbalanced(
        self, q: torch.Tensor, block_tables: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
    ) -> AttendRows:
        """`_bind_decode`; lengths uint32 [rows, 1]."""
        if self.uses_xqa:
            return self._xqa.bind(q, block_tables, lengths, out)

        def decode(layer: AttentionLayer) -> None:
            paged_decode(
                q,
                self._cache.layers[layer.index],
                block_tables,
                lengths,
                out,
                scale=layer.scale,
                window=layer.window,
                num_sms=self._num_sms,
            )

        return decode

    def _get_balanced(self, rows: DecodeRows) -> BalancedDecode | None:
        """Where it can do so many."""
        return self._wait_for_balanced() if len(rows.positions) <= MAX_ROWS else None

    def _wait_for_balanced(self) -> BalancedDecode | None:
        """For the compiler, once."""
        if self._load_balanced is not None:
            launch, self._load_balanced = self._load_balanced(), None
            if launch is not None:
                self._balanced = BalancedDecode(self._cache, self._layers[0], launch, self._num_sms)
        return self._balanced


def _lengths(rows: DecodeRows) -> torch.Tensor:
    """uint32 [rows, 1], as XQA wants it: keys that each row sees, its own included."""
    return (rows.positions + 1).view(torch.uint32).unsqueeze(1)


def xqa_supports(capability: tuple[int, int], head_dim: int, block_size: int) -> bool:
    return (
        capability[0] in XQA_CAPABILITIES
        and head_dim in XQA_HEAD_DIMS
        and block_size in XQA_PAGE_SIZES
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
