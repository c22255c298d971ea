"""Low-rank adapters (LoRA): what a linear layer adds to its product for tokens that use one.

Every layer holds the matrices of all adapter slots, so tokens of different adapters, and of none,
share a forward pass. For a token of slot s the features of part p get

    b[s, features of p] @ (a[s, p] @ x)        a: [max_rank, in], b: [features, max_rank]

An adapter of a smaller rank has zeros behind its own; its scale is in b. Slot 0 is of tokens
without an adapter: it is never read. `LoRALayers` belongs to one model; each of its linear layers
asks it for a `LoRALayer`. Which slot each token of a step has is told by `select`, before the
forward pass that it is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch

from asyncllm.kernels.records import LoRAWeights as LoRAWeights
from asyncllm.models.layers.linear_method import LinearShape
from asyncllm.types import NO_ADAPTER

# (product [T, out], x [T, in], weights, slots int32 [T]): adds each token's to its product, in
# place. Only enqueues, and may be captured, where its device has streams.
AddLoRA = Callable[[torch.Tensor, torch.Tensor, LoRAWeights, torch.Tensor], None]


def add_lora_torch(
    product: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, slots: torch.Tensor
) -> None:
    """The reference `AddLoRA`, for a CPU: one product for each adapter that tokens use."""
    for slot in slots.unique().tolist():
        if slot == NO_ADAPTER:
            continue
        tokens = (slots == slot).nonzero().squeeze(1)
        shrunk = x[tokens] @ weights.a[slot].T  # [tokens, parts * max_rank]
        ranks = shrunk.split(weights.b.shape[2], dim=1)
        features = weights.b[slot].split(weights.sizes)
        deltas = [h @ b.T for h, b in zip(ranks, features, strict=True)]
        product.index_add_(0, tokens, torch.cat(deltas, dim=1))


class LoRALayers:
    """The adapter slots of one model: `num_slots` of them besides slot 0.

    All that a slot holds is one row of `slots` [1 + num_slots, elements], so that an adapter comes
    as few copies, whatever its layers are. `add`: the device's `AddLoRA`.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        add: AddLoRA = add_lora_torch,
    ) -> None:
        self.max_rank = max_rank
        self.add = add
        self.layers: list[LoRALayer] = []
        self.elsewhere: tuple[str, ...] = ()  # what names of other stages' modules begin with
        self.token_slots: torch.Tensor | None = None  # of the forward pass that runs
        self.slots = torch.zeros(1 + num_slots, 0, dtype=dtype, device=device)

    def layer(self, shape: LinearShape) -> LoRALayer:
        """For a linear layer of this shape."""
        layer = LoRALayer(self, shape)
        self.layers.append(layer)
        return layer

    def allocate(self) -> None:
        """Once, when the model's layers are made: the memory of all slots, as zeros."""
        num_elements = sum(layer.num_elements for layer in self.layers)
        self.slots = self.slots.new_zeros(len(self.slots), num_elements)
        views = self.views(self.slots)
        for layer, (a, b) in zip(self.layers, views, strict=True):
            layer.weights = LoRAWeights(a, b, tuple(layer.shape.sizes.values()))

    def views(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """a and b of each layer in memory that is laid out as `slots`: [n, elements]."""
        found, first = [], 0
        for layer in self.layers:
            shapes = layer.shapes
            a, b = slots[:, first : first + layer.num_elements].split(
                [math.prod(shape) for shape in shapes], dim=1
            )
            found.append((a.unflatten(1, shapes[0]), b.unflatten(1, shapes[1])))
            first += layer.num_elements
        return found

    def select(self, token_slots: torch.Tensor | None) -> None:
        """The slot of each token, int32 [T], of all products until the next call. None: no token
        has an adapter, and the layers run as if there were none."""
        self.token_slots = token_slots


class LoRALayer:
    """The adapters of one linear layer. Its `weights` are there after `LoRALayers.allocate`.

    Where ranks share the layer, a rank's matrices have the rows or columns of its product; so what
    they add to a summand is a summand, too.
    """

    weights: LoRAWeights

    def __init__(self, owner: LoRALayers, shape: LinearShape) -> None:
        self._owner = owner
        self.shape = shape
        sizes, rank = shape.sizes, owner.max_rank
        # Of a slot.
        self.shapes = (len(sizes) * rank, shape.num_columns), (shape.out_features, rank)
        ends = list(accumulate(sizes.values()))
        starts = [0, *ends]
        # Each part's features in the output.
        self.rows = {name: slice(*row) for name, *row in zip(sizes, starts, ends, strict=False)}

    @property
    def num_elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def is_used(self) -> bool:
        """Whether tokens of the forward pass that runs have adapters."""
        return self._owner.token_slots is not None

    def add(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The product [T, out] of x [T, in], with the tokens' deltas added in place."""
        if self._owner.token_slots is not None:
            self._owner.add(product, x, self.weights, self._owner.token_slots)
        return product
