"""Prefill attention of one step by FlashInfer's paged wrappers, FA3 on Hopper, FA2 elsewhere.

`prepare` plans on the host, `bind` gives what to call per layer. plan() fills a pinned buffer that
the device reads later, and `prepare` another, so a step launched ahead must not use the same
`PrefillPlan`: each has an event after its last copies, and two take turns.

A wrapper's `run` spends most of its time on checks in Python, once per layer. With the version that
was read and tested its module is called directly, with the same arguments; with any other, `run`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from asyncllm.attention.base import AttendRows, AttentionLayer, PrefillRows
from asyncllm.attention.flashinfer_import import flashinfer
from asyncllm.attention.kv_cache import KVCache

TESTED_VERSION = "0.6.12"  # of the private names in `_direct`
MASK_CAUSAL = 1  # flashinfer.utils.MaskMode
LAYOUT_NHD = 0  # flashinfer.utils.TensorLayout

# (keys, values) of a layer, [pages, block_size, kv_heads, head_dim] each
Call = Callable[[torch.Tensor, torch.Tensor], None]


class PrefillPlan:
    """A wrapper per window, re-planned when its last copies have been read.

    `layers` differ in their windows only.
    """

    def __init__(
        self, layers: list[AttentionLayer], cache: KVCache, workspace: torch.Tensor
    ) -> None:
        self._layer = layers[0]
        self._block_size = cache.block_size
        self._dtype = cache.layers[0].dtype
        self._keys_values = [(layer[:, 0], layer[:, 1]) for layer in cache.layers]
        device = workspace.device
        self._pdl = torch.cuda.get_device_capability(device)[0] >= 9
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend="fa3" if hopper and window is None else "fa2"
            )
            for window in {layer.window for layer in layers}
        }
        self._pinned = torch.empty(1 << 12, dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()

    def prepare(self, rows: PrefillRows) -> None:
        # Done long ago: the step that used this plan was waited for before this one was planned.
        self._copied.synchronize()
        num_pages = np.diff(rows.page_indptr)
        last_page_lens = rows.kv_lens - (num_pages - 1) * self._block_size
        pinned = self._to_pinned(rows.query_indptr, rows.page_indptr, rows.pages, last_page_lens)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                *pinned,
                self._layer.num_heads,
                self._layer.num_kv_heads,
                self._layer.head_dim,
                self._block_size,
                causal=True,
                sm_scale=self._layer.scale,
                window_left=_window_left(window),
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        self._copied.record()

    def bind(self, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        """Attention of the planned rows; q, out [tokens, num_heads, head_dim]."""
        bind = self._direct if flashinfer.__version__ == TESTED_VERSION else self._public
        calls = {window: bind(window, q, out) for window in self._wrappers}

        def attend(layer: AttentionLayer) -> None:
            calls[layer.window](*self._keys_values[layer.index])

        return attend

    def _public(self, window: int | None, q: torch.Tensor, out: torch.Tensor) -> Call:
        wrapper = self._wrappers[window]

        def call(keys: torch.Tensor, values: torch.Tensor) -> None:
            wrapper.run(q, (keys, values), out=out)

        return call

    def _direct(self, window: int | None, q: torch.Tensor, out: torch.Tensor) -> Call:
        """What `wrapper.run` comes to, without what it checks."""
        wrapper = self._wrappers[window]
        run = wrapper._cached_module.paged_run
        planned = (
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._plan_info, q,
        )  # fmt: skip
        rest = (
            wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf,
            wrapper._paged_kv_last_page_len_buf, out, None, MASK_CAUSAL, LAYOUT_NHD,
            _window_left(window), self._pdl,
            *[None] * 6,  # masks, ALiBi, several items in a row
            0.0, self._layer.scale,  # no soft cap
            *[None] * 3,  # scales of FP8
            1.0, 1e4, 0, 0,  # rotation and items, unused
        )  # fmt: skip

        def call(keys: torch.Tensor, values: torch.Tensor) -> None:
            run(*planned, keys, values, *rest)

        return call

    def _to_pinned(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """int32 tensors in one pinned buffer, so that plan()'s copies of them do not wait."""
        total = sum(map(len, arrays))
        if total > len(self._pinned):
            self._pinned = torch.empty(2 * total, dtype=torch.int32, pin_memory=True)
        views = list(self._pinned[:total].split([len(array) for array in arrays]))
        np.concatenate(arrays, out=self._pinned.numpy()[:total], casting="same_kind")
        return views


def _window_left(window: int | None) -> int:
    """As FlashInfer counts: the token itself is not part of the window, -1 is no window."""
    return -1 if window is None else window - 1
