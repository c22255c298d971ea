"""Groups a model's layers by their constants.

Kernels are compiled, planned and bound for constants, so they are chosen per kind of layer: if full
attention alternates with windows, each kind runs its best kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from asyncllm.attention.base import AttentionLayer

T = TypeVar("T")


class LayerKinds:
    """A model's kinds of layers, numbered in the order of their first layers."""

    def __init__(
        self, layers: Sequence[AttentionLayer], group_of: Sequence[int] | None = None
    ) -> None:
        """group_of: each layer's cache group, by layer index; None: there is one group."""
        found: dict[tuple[object, ...], list[AttentionLayer]] = {}
        for layer in layers:  # all constants but the index and the values of tensors
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
        self.pairs = list(dict.fromkeys(pairs.values()))  # all (kind, group)
        self._pair_of = {index: self.pairs.index(pair) for index, pair in pairs.items()}

    def select(self, bind: Callable[[int, int], Callable[..., T]]) -> Callable[..., T]:
        """Call `bind` for each (kind, group). The result dispatches on its first argument, the
        layer."""
        calls = [bind(kind, group) for kind, group in self.pairs]
        if len(calls) == 1:
            return calls[0]
        pair_of = self._pair_of
        return lambda layer, *args: calls[pair_of[layer.index]](layer, *args)
