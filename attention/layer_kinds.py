"""A model's layers grouped by their constants, and the decode kernel that each group gets.

Kernels are compiled, planned and bound for constants, so those are chosen per kind and not per
model: where full attention alternates with windows, each runs its best kernel in the same step.
Shapes and a card's capability decide, no device is asked: `asyncllm doctor` prints the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch

from asyncllm.attention.base import AttentionLayer
from asyncllm.kernels import balanced_decode

XQA_CAPABILITIES = (9, 10, 12)  # major
XQA_HEAD_DIMS = (64, 128, 256)
XQA_PAGE_SIZES = (16, 32, 64, 128)

T = TypeVar("T")


class LayerKind(NamedTuple):
    """A layer's constants, but its index and its norm's weights: these decide nothing."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None

    @classmethod
    def of(cls, layer: AttentionLayer) -> LayerKind:
        return cls(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.window)


class LayerKinds:
    """A model's kinds, numbered in the order in which its layers have them first."""

    def __init__(self, layers: Iterable[AttentionLayer]) -> None:
        found: dict[LayerKind, list[AttentionLayer]] = {}
        for layer in layers:
            found.setdefault(LayerKind.of(layer), []).append(layer)
        self.layers = [alike[0] for alike in found.values()]  # one of each kind
        self.number_of = {  # layer index -> the number of its kind
            layer.index: number for number, alike in enumerate(found.values()) for layer in alike
        }

    def select(self, calls: Sequence[Callable[..., T]]) -> Callable[..., T]:
        """One call from one for each kind; the first argument is the layer."""
        if len(calls) == 1:
            return calls[0]
        number_of = self.number_of
        return lambda layer, *args: calls[number_of[layer.index]](layer, *args)


class DecodeKernels(NamedTuple):
    names: tuple[str, ...]  # those that can, the best first
    reason: str  # why the others cannot


def choose_decode_kernels(
    kind: LayerKind, dtype: torch.dtype, block_size: int, capability: tuple[int, int]
) -> DecodeKernels:
    """For decode steps of several rows. The first may miss some, by their number or for want of a
    compiler; the next takes these. One row has fused_decode before all."""
    group = kind.num_heads // kind.num_kv_heads
    card, dim = f"compute capability {capability}", f"head_dim {kind.head_dim}"
    limits = {
        "balanced_decode": (  # its `definitions`, and its GPUs
            (capability in balanced_decode.KERNEL.capabilities, card),
            (dtype is torch.bfloat16, str(dtype)),
            (kind.window is None, f"a window of {kind.window}"),
            (kind.head_dim in balanced_decode.HEAD_DIMS, dim),
            (group <= balanced_decode.MAX_GROUP, f"{group} query heads of one KV head"),
            (block_size % balanced_decode.TILE == 0, f"block_size {block_size}"),
        ),
        "xqa": (
            (capability[0] in XQA_CAPABILITIES, card),
            (kind.head_dim in XQA_HEAD_DIMS, dim),
            (block_size in XQA_PAGE_SIZES, f"block_size {block_size}"),
        ),
        "paged_decode": (),
    }
    names, reasons = [], []
    for name, its in limits.items():
        missed = next((limit for is_met, limit in its if not is_met), None)
        if missed is None:
            names.append(name)
        else:
            reasons.append(f"{name} does not do {missed}")
    return DecodeKernels(tuple(names), ", ".join(reasons))
