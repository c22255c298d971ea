"""The KV cache: tensors on the device, and one pinned host tensor for swapped pages.

    storages[i]  [num_pages, words]             int64
    host         [num_host_pages, num_storages, words]
    layers[i]    [num_pages, 2 (key, value), block_size, num_kv_heads, head_dim], views of storages;
                 of latents [num_pages, block_size, head_dim]

cache_spec.py assigns storages to layers. All backends read the same layout of keys and values
("NHD" in FlashInfer). A host page holds a page of each storage, so a swap is one contiguous copy
per page. Page 0 is padding: only its first position may be written. Pages are zero at the start,
because attention multiplies padding by 0, and 0 times garbage may be NaN.

In FP8, keys and values are stored divided by their layer's scales (`KVScales`), which multiply
scores and output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.host_pages import HostPages

SWAP_CHUNK_PAGES = 32  # pages gathered per copy: bounds the temporary on the device


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of each layer."""

    keys: list[float]
    values: list[float]

    @classmethod
    def ones(cls, num_layers: int) -> KVScales:
        return cls([1.0] * num_layers, [1.0] * num_layers)


class KVCache:
    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        device: torch.device,
        host_pages: HostPages | None = None,
        scales: KVScales | None = None,
    ) -> None:
        """num_pages: including the padding page. scales: for FP8."""
        self.scales = scales or KVScales.ones(len(layout.specs))
        self.block_size = layout.block_size
        self.num_pages = num_pages
        self.group_of = layout.group_of  # by layer index
        self.num_groups = layout.num_groups
        self.device = device
        shape = (num_pages, layout.page_words)
        self.storages = [_zeros(shape, device) for _ in range(layout.num_storages)]
        self.layers = [
            self.storages[place][:, : spec.page_words]
            .view(spec.dtype)
            .unflatten(1, spec.page_shape)
            for spec, place in zip(layout.specs, layout.storage_of, strict=True)
        ]
        # For layers without latents: views [num_pages, block_size, num_kv_heads, head_dim].
        self.keys_values = [(layer[:, 0], layer[:, -1]) for layer in self.layers]
        self._host_pages = host_pages or HostPages(layout.host_shape(0), torch.int64, device)

    @property
    def is_fp8(self) -> bool:
        return self.layers[0].dtype.itemsize == 1

    @property
    def host(self) -> torch.Tensor:
        """The host pages. The first call waits for their allocation."""
        return self._host_pages.tensor

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v, [tokens, kv_heads, head_dim], to flat positions page * block_size + i.
        Latents have no v."""
        cache = self.layers[layer]
        page, offset = slots // self.block_size, slots % self.block_size
        if cache.dtype.itemsize == 1:
            k = _as_fp8(k, self.scales.keys[layer], cache.dtype)
        if cache.dim() == 3:
            cache[page, offset] = k.squeeze(1)
            return
        if cache.dtype.itemsize == 1:
            v = _as_fp8(v, self.scales.values[layer], cache.dtype)
        cache[page, 0, offset] = k
        cache[page, 1, offset] = v

    def read(self, layer: int, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The contents of these pages in `dtype`: [*pages, 2, block_size, num_kv_heads, head_dim],
        or latents [*pages, block_size, head_dim]. FP8 scales are not applied."""
        return self.layers[layer][pages].to(dtype)

    def scales_of(self, layer: int) -> tuple[float, float]:
        """The scales of a layer's keys and of its values."""
        return self.scales.keys[layer], self.scales.values[layer]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to) on the device; all reads come before all writes."""
        if pairs:
            source, target = (self._indices(list(pages)) for pages in zip(*pairs, strict=True))
            for storage in self.storages:
                storage[target] = storage[source]

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages, on the current stream."""
        if pages:
            indices = self._indices(list(pages))
            for storage in self.storages:
                storage.index_fill_(0, indices, 0)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device page, host page), on the current stream."""
        if not self.storages:
            return
        for start in range(0, len(pairs), SWAP_CHUNK_PAGES):
            chunk = pairs[start : start + SWAP_CHUNK_PAGES]
            pages = self._indices([page for page, _ in chunk])
            gathered = torch.stack([storage[pages] for storage in self.storages], dim=1)
            for i, (_, host_page) in enumerate(chunk):
                self.host[host_page].copy_(gathered[i], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host page, device page), on the current stream."""
        if not self.storages:
            return
        for start in range(0, len(pairs), SWAP_CHUNK_PAGES):
            chunk = pairs[start : start + SWAP_CHUNK_PAGES]
            pages = self._indices([page for _, page in chunk])
            staged = self.storages[0].new_empty((len(chunk), *self.host.shape[1:]))
            for i, (host_page, _) in enumerate(chunk):
                staged[i].copy_(self.host[host_page], non_blocking=True)
            for place, storage in enumerate(self.storages):
                storage[pages] = staged[:, place]

    def _indices(self, pages: list[int]) -> torch.Tensor:
        on_cuda = self.device.type == "cuda"
        indices = torch.tensor(pages, dtype=torch.int64, pin_memory=on_cuda)
        return indices.to(self.device, non_blocking=True)  # pinned, so nothing waits


def _as_fp8(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Clamped to the range of `dtype`: infinity or NaN would spoil a whole row."""
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-most, most).to(dtype)


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 zeros. On the CPU from numpy, whose memory is allocated when it is touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.int64, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape), np.int64)).view(shape)
