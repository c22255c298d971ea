"""Low-rank adapters (LoRA): what a linear layer adds to its product for tokens that use one.

Every layer holds the matrices of all adapter slots, so tokens of different adapters, and of none,
share a forward pass. For a token of slot s the features of part p get

    b[s, features of p] @ (a[s, p] @ x) + bias[s, features of p]      a: [max_rank, in]
                                                                     b: [features, max_rank]

An adapter of a smaller rank has zeros behind its own; its scale is in b. Slot 0 is of tokens
without an adapter and holds zeros. `LoRALayers` belongs to one model, whose layers ask it for a
`LoRALayer` each. Which slot each row has is told by `select`, before the forward pass that it is
about, and again before the logits of other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from asyncllm.kernels.records import LoRAWeights as LoRAWeights
from asyncllm.types import NO_ADAPTER

# (makes the product [T, out], x [T, in], weights, slots int32 [T]): the product, with what each
# token's adapter adds. Only enqueues, and may be captured, where its device has streams.
AddLoRA = Callable[
    [Callable[[], torch.Tensor], torch.Tensor, LoRAWeights, torch.Tensor], torch.Tensor
]
ALIGNMENT = 64  # elements: kernels read a slot's matrices in 16 bytes

L = TypeVar("L", bound="AdaptedLayer")


def add_lora_torch(
    product: Callable[[], torch.Tensor], x: torch.Tensor, weights: LoRAWeights, slots: torch.Tensor
) -> torch.Tensor:
    """The reference `AddLoRA`, for a CPU: one product for each adapter that tokens use."""
    out = product()
    for slot in slots.unique().tolist():
        if slot == NO_ADAPTER:
            continue
        tokens = (slots == slot).nonzero().squeeze(1)
        shrunk = x[tokens] @ weights.a[slot].T  # [tokens, parts * max_rank]
        ranks = shrunk.split(weights.b.shape[2], dim=1)
        features = weights.b[slot].split(weights.sizes)
        deltas = [h @ b.T for h, b in zip(ranks, features, strict=True)]
        delta = torch.cat(deltas, dim=1) + weights.bias[slot]
        out.index_add_(0, tokens, delta.to(out.dtype))
    return out


@dataclass(frozen=True, slots=True)
class Place:
    """Where one module of the checkpoint has its matrices in one slot: views.

    rows: output i is the module's output rows[i]. base_bias: what the slot's bias is added to.
    base_weight: what an adapter may repeat, and must not change.
    """

    a: torch.Tensor  # [max_rank, in]
    b: torch.Tensor  # [out, max_rank]
    bias: torch.Tensor | None = None  # [out]
    rows: torch.Tensor | None = None
    base_bias: torch.Tensor | None = None
    base_weight: torch.Tensor | None = None


class AdaptedLayer(Protocol):
    """shapes: of the tensors that a slot has of it."""

    shapes: Sequence[tuple[int, ...]]

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Of all slots, each [1 + slots, *shape]: once they are allocated."""
        ...

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        """In the tensors of one slot, by the names of modules."""
        ...


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
        self.layers: list[AdaptedLayer] = []
        self.row_slots: torch.Tensor | None = None  # of the pass that runs
        self.slots = torch.zeros(1 + num_slots, 0, dtype=dtype, device=device)

    def register(self, layer: L) -> L:
        self.layers.append(layer)
        return layer

    def layer(self, parts: Mapping[str, int], in_features: int) -> LoRALayer:
        """For a linear layer of these parts: name in the checkpoint -> output features."""
        return self.register(LoRALayer(self, parts, in_features))

    def allocate(self) -> None:
        """Once, when the model's layers are made: the memory of all slots, as zeros."""
        shapes = [shape for layer in self.layers for shape in layer.shapes]
        self.slots = self.slots.new_zeros(len(self.slots), sum(map(_aligned, shapes)))
        for layer, tensors in zip(self.layers, self._tensors(self.slots), strict=True):
            layer.bind(tensors)

    def places(self, slot: torch.Tensor) -> dict[str, Place]:
        """In memory that is laid out as one of `slots`: [elements]."""
        found: dict[str, Place] = {}
        for layer, tensors in zip(self.layers, self._tensors(slot[None]), strict=True):
            found.update(layer.places([tensor[0] for tensor in tensors]))
        return found

    def _tensors(self, slots: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Of each layer, in slots [n, elements]: [n, *shape]."""
        first = 0
        for layer in self.layers:
            tensors = []
            for shape in layer.shapes:
                size = math.prod(shape)
                tensors.append(slots[:, first : first + size].unflatten(1, shape))
                first += _aligned(shape)
            yield tensors

    def select(self, row_slots: torch.Tensor | None) -> None:
        """The slot of each row, int32 [T], of all products until the next call. None: no row has an
        adapter, and the layers run as if there were none."""
        self.row_slots = row_slots


def _aligned(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT


class LoRALayer:
    """The adapters of one linear layer. Its `weights` are there after `LoRALayers.allocate`.

    Set by the layer: `orders`, part -> as `Place.rows`; `base`, its tensors `weight` and `bias`,
    the latter for all parts.
    """

    weights: LoRAWeights

    def __init__(self, owner: LoRALayers, parts: Mapping[str, int], in_features: int) -> None:
        self._owner = owner
        self._parts = parts
        self.orders: dict[str, torch.Tensor] = {}
        self.base: Mapping[str, torch.Tensor] = {}
        rank, out = owner.max_rank, sum(parts.values())
        self.shapes = (len(parts) * rank, in_features), (out, rank), (out,)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        a, b, bias = tensors
        self.weights = LoRAWeights(a, b, bias, tuple(self._parts.values()))

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        a, b, bias = tensors
        ends = list(accumulate(self._parts.values()))
        base_bias, rank = self.base.get("bias"), self._owner.max_rank
        for part, (name, start, end) in enumerate(zip(self._parts, [0, *ends], ends, strict=False)):
            yield (
                name,
                Place(
                    a[part * rank : (part + 1) * rank],
                    b[start:end],
                    bias[start:end],
                    self.orders.get(name),
                    None if base_bias is None else base_bias[start:end],
                    self.base.get("weight") if len(self._parts) == 1 else None,
                ),
            )

    @property
    def is_used(self) -> bool:
        """Whether rows of the pass that runs have adapters."""
        return self._owner.row_slots is not None

    def add(self, product: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """The product [T, out] of x [T, in], with the rows' deltas."""
        slots = self._owner.row_slots
        return product() if slots is None else self._owner.add(product, x, self.weights, slots)


class LoRAEmbedding:
    """The adapters of an embedding: a row of `a` for each token id, as peft's lora_embedding_A has
    a column."""

    def __init__(
        self, owner: LoRALayers, name: str, weight: torch.Tensor, scale: float = 1.0
    ) -> None:
        self._owner, self._name, self._weight, self._scale = owner, name, weight, scale
        vocab_size, size = weight.shape
        self.shapes = (vocab_size, owner.max_rank), (size, owner.max_rank)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        self._a, self._b = tensors

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        a, b = tensors
        yield self._name, Place(a.T, b, base_weight=self._weight)

    def add(self, vectors: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """vectors [T, size] of token_ids [T], with the tokens' deltas."""
        slots = self._owner.row_slots
        if slots is None:
            return vectors
        shrunk = self._a[slots.long(), token_ids.long()]  # [T, max_rank]
        mine = F.one_hot(slots.long(), len(self._a)).to(shrunk.dtype)  # [T, slots]
        by_slot = (mine.unsqueeze(2) * shrunk.unsqueeze(1)).flatten(1)
        b = self._b.transpose(1, 2).flatten(0, 1)  # [slots * max_rank, size]
        return vectors.addmm_(by_slot, b, alpha=self._scale)
