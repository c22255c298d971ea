"""Attention of mixed steps in full graphs: FA3 for prefills, balanced_decode for decodes.

FlashInfer's FA3 kernel has one block per SM, which takes its work from lists in a workspace. A
launch only has the addresses of these lists, so a captured launch does whatever they contain;
prefill_lists.py fills them. balanced_decode reads positions on the device. It is launched on a
stream of its own, shortly after FA3: SMs without prefill tiles left start on decodes while others
still work.
"""

from __future__ import annotations

import torch

from asyncllm.attention.base import AttendRows, AttentionLayer, DecodeRows, PrefillRows
from asyncllm.attention.flashinfer.prefill import PrefillModule
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.prefill_lists import Limits, PrefillLists
from asyncllm.kernels.balanced_decode import MAX_ROWS, BalancedDecode
from asyncllm.kernels.declaration import Launch, num_sms

MAX_PREFILLS = 256  # rows
MAX_PAGES = 1 << 16  # of all rows


class FlashInferSteps:
    """A `StepAttention`, for layers of one kind and cache group."""

    max_decodes = MAX_ROWS
    max_prefills = MAX_PREFILLS
    max_pages = MAX_PAGES

    def __init__(
        self,
        layer: AttentionLayer,
        cache: KVCache,
        workspace: torch.Tensor,
        balanced: BalancedDecode,
        max_tokens: int,
        make_lists: Launch,
    ) -> None:
        """`layer`: any of them. `workspace` may be shared with what else runs on the stream.
        `make_lists`: prefill_lists.cu's. Belongs to the current stream."""
        device = workspace.device
        limits = Limits(max_tokens, MAX_PREFILLS, MAX_PAGES)
        self._keys_values = cache.keys_values
        self._balanced = balanced
        self._side = torch.cuda.Stream(device)
        stream = torch.cuda.current_stream(device).cuda_stream
        self._lists = PrefillLists(layer, limits, make_lists, num_sms(device), device, stream)
        self._module = PrefillModule(
            layer, cache, workspace, cache.layers[0].dtype, self._lists.workspace
        )
        self._module.follow(self._lists.places, self._lists.pages)

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> None:
        self._lists.prepare(num_decodes, prefills)

    def bind(self, decodes: DecodeRows | None, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        prefill = self._module.bind(q, out)
        if decodes is None:
            return lambda layer: prefill(layer, *self._keys_values[layer.index])
        (tables,), positions = decodes.block_tables, decodes.positions
        rows = slice(len(positions))
        main, side = torch.cuda.current_stream(q.device), self._side
        with torch.cuda.stream(side):
            # Started early it would come before FA3.
            decode = self._balanced.bind(q[rows], tables, positions, out[rows], starts_early=False)

        def attend(layer: AttentionLayer) -> None:
            side.wait_stream(main)  # keys and values are written
            prefill(layer, *self._keys_values[layer.index])
            with torch.cuda.stream(side):
                decode(layer)
            main.wait_stream(side)  # what comes next reads all rows of `out`

        return attend
