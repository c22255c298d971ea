"""A model's layers grouped by their constants.

Kernels are compiled, planned and bound for constants, so those are chosen per kind and not per
model: where full attention alternates with windows, each runs its best kernel in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from asyncllm.attention.base import AttentionLayer

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
