"""A model's layers grouped by their constants, and the decode kernel that each group gets.

Kernels are compiled, planned and bound for constants, so those are chosen per kind and not per
model: where full attention alternates with windows, each runs its best kernel in the same step.
Shapes and a GPU's capability decide, no device is asked: `asyncllm doctor` prints the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from asyncllm.attention.base import AttentionLayer
from asyncllm.kernels import balanced_decode

XQA_CAPABILITIES = (9, 10, 12)  # major
XQA_HEAD_DIMS = (64, 128, 256)
XQA_PAGE_SIZES = (16, 32, 64, 128)

T = TypeVar("T")


class LayerKinds:
    """A model's kinds, numbered in the order in which its layers have them first."""

    def __init__(
        self, layers: Sequence[AttentionLayer], group_of: Sequence[int] | None = None
    ) -> None:
        """group_of: each layer's cache group, by its index; None: they have one."""
        found: dict[tuple[object, ...], list[AttentionLayer]] = {}
        for layer in layers:  # neither index nor weights of norms, sinks and slopes decide anything
            heads = layer.num_heads, layer.num_kv_heads, layer.head_dim
            scores = layer.scale, layer.window, layer.soft_cap
            has = layer.sinks is not None, layer.slopes is not None
            found.setdefault((*heads, *scores, *has, layer.latent_dim), []).append(layer)
        self.layers = [alike[0] for alike in found.values()]  # one of each kind
        self.number_of = {  # layer index -> the number of its kind
            layer.index: number for number, alike in enumerate(found.values()) for layer in alike
        }
        pairs = {
            index: (number, group_of[index] if group_of else 0)
            for index, number in self.number_of.items()
        }
        self.pairs = list(dict.fromkeys(pairs.values()))  # kinds with the groups they are in
        self._pair_of = {index: self.pairs.index(pair) for index, pair in pairs.items()}

    def select(self, bind: Callable[[int, int], Callable[..., T]]) -> Callable[..., T]:
        """One call from `bind`'s for each kind and group; the first argument is the layer."""
        calls = [bind(kind, group) for kind, group in self.pairs]
        if len(calls) == 1:
            return calls[0]
        pair_of = self._pair_of
        return lambda layer, *args: calls[pair_of[layer.index]](layer, *args)


class DecodeKernels(NamedTuple):
    names: tuple[str, ...]  # those that can, the best first
    reason: str  # why the others cannot


def choose_decode_kernels(
    layer: AttentionLayer, dtype: torch.dtype, block_size: int, capability: tuple[int, int]
) -> DecodeKernels:
    """For decode steps of several rows. The first may miss some, by their number or for want of a
    compiler; the next takes these. One row has fused_decode before all."""
    if layer.latent_dim is not None:
        return DecodeKernels(("latent_attention",), "the others do not do latents")
    gpu = f"compute capability {capability}"
    limits: dict[str, str | None] = {"balanced_decode": gpu, "xqa": gpu}
    if capability in balanced_decode.KERNEL.capabilities:
        limits["balanced_decode"] = balanced_decode.limit(layer, dtype, block_size)
    if capability[0] in XQA_CAPABILITIES:
        limits["xqa"] = _xqa_limit(layer, block_size)
    names = [name for name, limit in limits.items() if limit is None]
    reasons = [f"{name} does not do {limit}" for name, limit in limits.items() if limit is not None]
    return DecodeKernels((*names, "paged_decode"), ", ".join(reasons))


def _xqa_limit(layer: AttentionLayer, block_size: int) -> str | None:
    if layer.head_dim not in XQA_HEAD_DIMS:
        return f"head_dim {layer.head_dim}"
    if layer.soft_cap is not None:
        return f"a soft cap of {layer.soft_cap}"
    if layer.sinks is not None:
        return "sinks"
    if layer.slopes is not None:
        return "slopes (ALiBi)"
    return None if block_size in XQA_PAGE_SIZES else f"block_size {block_size}"
