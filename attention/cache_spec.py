"""The KV cache layout: cache groups of layers over one page pool.

Each layer declares a `CacheSpec`. Layers with equal specs hold the same blocks of a sequence and
are divided into groups of equal size, the bundle. A page holds a block of tokens of all layers of a
group. Layer i of each group is a view of `storage[i]`, so any group can use any page, and no memory
is reserved for a kind of layers. With a single spec, all layers are one group and each has a
storage. Without attention layers (state_cache.py) there is one group whose pages have no bytes:
they count tokens and identify the blocks of a prefix.

    4 windows, 2 full      storage 0   storage 1
    group 0 (window)       layer 0     layer 1        a page of the pool is a row through
    group 1 (window)       layer 3     layer 4        all storages, and belongs to the group
    group 2 (full)         layer 2     layer 5        that has taken it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from asyncllm.attention.base import AttentionLayer
from asyncllm.cache_group import CacheGroup

MAX_EMPTY_PAGES = 1 << 16  # pages without bytes
MAX_GROUPS = 8  # each has a block table, and takes at least a page per sequence
WORD_BYTES = 8  # pages are moved as int64


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A layer's part of a page. window: tokens for which it is kept; None: always."""

    page_shape: tuple[int, ...]
    dtype: torch.dtype
    window: int | None = None

    @property
    def page_words(self) -> int:
        return -(-math.prod(self.page_shape) * self.dtype.itemsize // WORD_BYTES)


def spec_of(layer: AttentionLayer, block_size: int, dtype: torch.dtype) -> CacheSpec:
    """Pages of keys and values [2, block_size, num_kv_heads, head_dim], or of latents
    [block_size, head_dim]."""
    if layer.latent_dim is not None:
        return CacheSpec((block_size, layer.head_dim), dtype, layer.window)
    return CacheSpec((2, block_size, layer.num_kv_heads, layer.head_dim), dtype, layer.window)


class CacheLayout:
    """The group and the storage of each layer, by the layer's index."""

    def __init__(
        self, layers: Sequence[AttentionLayer], block_size: int, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        self.specs = [spec_of(layer, block_size, dtype) for layer in layers]
        alike: dict[CacheSpec, list[int]] = {}
        for index, spec in enumerate(self.specs):
            alike.setdefault(spec, []).append(index)
        counts = {spec: len(of_spec) for spec, of_spec in alike.items()}
        self.num_storages = _bundle_size(counts) if counts else 0
        self.group_of = [0] * len(layers)
        self.storage_of = [0] * len(layers)
        self.windows: list[int | None] = [] if alike else [None]  # by group
        for spec, indices in alike.items():
            for place, index in enumerate(indices):
                if place % self.num_storages == 0:
                    self.windows.append(spec.window)
                self.group_of[index] = len(self.windows) - 1
                self.storage_of[index] = place % self.num_storages
        self.page_words = max((spec.page_words for spec in alike), default=0)  # of one storage

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all storages."""
        return self.num_storages * self.page_words * WORD_BYTES

    def num_pages_in(self, num_bytes: int) -> int:
        return num_bytes // self.page_bytes if self.page_bytes else MAX_EMPTY_PAGES

    def host_shape(self, num_pages: int) -> tuple[int, int, int]:
        """The shape of swapped pages, int64."""
        return num_pages, self.num_storages, self.page_words

    def groups(self, max_step_tokens: int) -> tuple[CacheGroup, ...]:
        return tuple(CacheGroup(self.block_size, w, max_step_tokens) for w in self.windows)


def _bundle_size(counts: dict[CacheSpec, int]) -> int:
    """The number of layers per group. counts: layers of each spec. Of all sizes that give at most
    MAX_GROUPS, it has the fewest unused places in groups without a window, then in all groups; the
    largest such size."""

    def num_places(size: int, which: Iterable[CacheSpec]) -> int:
        return sum(-(-counts[spec] // size) for spec in which) * size

    growing = [spec for spec in counts if spec.window is None]
    most_groups = max(MAX_GROUPS, len(counts))
    sizes = range(1, max(counts.values()) + 1)
    few = [size for size in sizes if num_places(size, counts) <= most_groups * size]
    return min(few, key=lambda size: (num_places(size, growing), num_places(size, counts), -size))
