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
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from asyncllm.kernels.records import LoRAWeights as LoRAWeights
from asyncllm.models.layers.linear_method import LinearShape
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

    Where ranks share the layer, a rank's matrices have the rows or columns of its product; so what
    they add to a summand is a summand, too.

    rows: output i here is the module's output rows[i]. base_bias: what the slot's bias is added to.
    base_weight: its `base_rows` of what an adapter may repeat, and must not change.
    """

    in_features: int  # the module's, as out_features
    out_features: int
    a: torch.Tensor | None  # [max_rank, in]; None: it is another rank's
    b: torch.Tensor  # [out, max_rank]
    columns: slice = field(default_factory=lambda: slice(None))  # of the module's inputs
    rows: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # [out]; None: it adds none here
    takes_bias: bool = False  # there, or on another rank
    base_bias: torch.Tensor | None = None
    base_weight: torch.Tensor | None = None
    base_rows: slice = field(default_factory=lambda: slice(None))


class AdaptedLayer(Protocol):
    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the tensors that a slot has for this layer."""
        ...

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the tensors of all slots, [1 + slots, *shape] each, once they are allocated."""
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
        self.elsewhere: tuple[str, ...] = ()  # what names of other stages' modules begin with
        self.row_slots: torch.Tensor | None = None  # of the pass that runs
        self.slots = torch.zeros(1 + num_slots, 0, dtype=dtype, device=device)

    def register(self, layer: L) -> L:
        self.layers.append(layer)
        return layer

    def layer(self, shape: LinearShape) -> LoRALayer:
        """For a linear layer of this shape."""
        return self.register(LoRALayer(self, shape, shape.out_features))

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
        """Each layer's tensors [n, *shape], as views of slots [n, elements]."""
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

    num_rows: the product's outputs here, of which there may be more than the shape's, as padding.
    Set by the layer: `orders`, part -> output i is the checkpoint's output orders[part][i];
    `base`, its tensors `bias`, of all parts, and `weight`, of an only one.
    """

    weights: LoRAWeights

    def __init__(self, owner: LoRALayers, shape: LinearShape, num_rows: int) -> None:
        self._owner = owner
        self.shape = shape
        self.orders: dict[str, torch.Tensor] = {}
        self.base: Mapping[str, torch.Tensor] = {}
        rank = owner.max_rank
        a_shape = len(shape.parts) * rank, shape.num_columns
        self.shapes = a_shape, (num_rows, rank), (num_rows,)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        a, b, bias = tensors
        *sizes, last = self.shape.sizes.values()
        padding = b.shape[1] - self.shape.out_features
        self.weights = LoRAWeights(a, b, bias, (*sizes, last + padding))

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        a, b, bias = tensors
        shape, sizes, rank = self.shape, self.shape.sizes, self._owner.max_rank
        ends = list(accumulate(sizes.values()))
        for part, (name, start, end) in enumerate(zip(sizes, [0, *ends], ends, strict=False)):
            base_bias = self.base.get("bias")
            yield name, Place(
                in_features=shape.in_features,
                out_features=shape.parts[name],
                a=a[part * rank : (part + 1) * rank],
                b=b[start:end],
                columns=shape.shard.columns or slice(None),
                rows=self._rows(name),
                bias=bias[start:end] if shape.shard.has_bias else None,
                takes_bias=True,
                base_bias=None if base_bias is None else base_bias[start:end],
                base_weight=self.base.get("weight"),
                base_rows=shape.rows(name)[0],
            )  # fmt: skip

    def _rows(self, name: str) -> torch.Tensor | None:
        order = self.orders.get(name)
        if order is None and self.shape.shard.rows is None:
            return None
        if order is None:
            order = torch.arange(self.shape.parts[name])
        return torch.cat([order[rows] for rows in self.shape.rows(name)])

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
        self,
        owner: LoRALayers,
        name: str,
        vocab_size: int,
        weight: torch.Tensor,
        tokens: slice,
        scale: float,
    ) -> None:
        """weight: of the `tokens` that this rank has, and perhaps rows of nothing. Adapters are not
        shared by ranks."""
        self._owner, self._name, self._scale = owner, name, scale
        self._weight, self._tokens = weight, tokens
        size = weight.shape[1]
        self.shapes = (vocab_size, owner.max_rank), (size, owner.max_rank)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        self._a, self._b = tensors

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        a, b = tensors
        sizes, base = (len(a), len(b)), {"base_weight": self._weight, "base_rows": self._tokens}
        yield self._name, Place(*sizes, a.T, b, **base)  # type: ignore[arg-type]

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
