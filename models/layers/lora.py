"""Low-rank adapters (LoRA): what a linear layer adds to its product for tokens that use one.

Every layer holds the matrices of all adapter slots, so tokens of different adapters, and of none,
share a forward pass. For a token of slot s the features of part p get

    gain[s] * product + b[s, features of p] @ (a[s, p] @ x) + bias[s]      a: [max_rank, in]
                                                                          b: [features, max_rank]

Where that makes the base's weight little larger, the `a` of all slots lie behind it too, as further
rows, so that one GEMM makes the product and, for all slots, what `a` shrinks:

    [base; a[1]; a[2]; ...] @ x            [out + num_slots * parts * max_rank, in]

An adapter of a smaller rank has zeros behind its own; its scale is in b. The gain is DoRA's, less
1. Modules that are named may have whole matrices instead of the base's, by which the product is
then made. Slot 0 is of tokens without an adapter and holds zeros.

`LoRALayers` belongs to one model, whose layers ask it for a `LoRALayer` each. Which slot each row
has is told by `select`, before the forward pass that it is about, and again before the logits of
other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import torch

from asyncllm.host import in_turns
from asyncllm.kernels.records import WholeWeights
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.layers.linear_method import LinearShape
from asyncllm.models.layers.lora_ops import TORCH_LORA, AdapterRows, LoRAOps, LoRAWeights
from asyncllm.models.layers.lora_places import ALL, Place, WeightPart

LAYERS_PER_TURN = 2  # of a thread that reads an adapter
MOST_BEHIND = 1 / 8  # of a base's outputs: rows of `a` behind it
ALIGNMENT = 64  # elements: kernels read a slot's matrices in 16 bytes

L = TypeVar("L", bound="AdaptedLayer")


class AdaptedLayer(Protocol):
    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the tensors that a slot has for this layer."""
        ...

    def bind(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        """Take the tensors of all slots, [1 + slots, *shape] each, once they are allocated; and
        which one of the layers this is."""
        ...

    def kind(self, tensors: Sequence[torch.Tensor]) -> int:
        """0, 1 or 2: what an adapter has in these tensors of one slot (`LoRALayers`)."""
        ...

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        """In the tensors of one slot, by the names of modules."""
        ...


class LoRALayers:
    """The adapter slots of one model: `num_slots` of them besides slot 0.

    All that a slot holds is one row of `slots` [1 + num_slots, elements], so that an adapter comes
    as few copies, whatever its layers are. It begins with a number for each layer: 0 where the slot
    has nothing of it, 1 where it has matrices, 2 where biases or gains, too. `ops`: the device's.
    `whole`: the ends of the names of linear layers and embeddings of which each slot has room for a
    whole matrix. `of_experts` has the experts' part: these same layers; or, where engines share the
    experts, and so compute each other's rows, others, which have the slots of all engines, this
    one's from behind `first_slot` on.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: LoRAOps = TORCH_LORA,
        whole: Sequence[str] = (),
        mesh: MeshConfig = MeshConfig(),  # noqa: B008
    ) -> None:
        self.of_experts, self.first_slot = self, mesh.engine * num_slots
        if mesh.dp > 1:
            self.of_experts = LoRALayers(mesh.dp * num_slots, max_rank, dtype, device, ops)
        self.max_rank = max_rank
        self._whole = whole
        self.ops = ops
        self.layers: list[AdaptedLayer] = []
        self.elsewhere: tuple[str, ...] = ()  # what names of other stages' modules begin with
        self.rows: AdapterRows | None = None  # of the pass that runs
        self.slots = torch.zeros(1 + num_slots, 0, dtype=dtype, device=device)

    def register(self, layer: L) -> L:
        self.layers.append(layer)
        return layer

    def layer(self, shape: LinearShape) -> LoRALayer:
        """For a linear layer of this shape."""
        return self.register(LoRALayer(self, shape, shape.out_features))

    def has_whole(self, module: str) -> bool:
        return any(_ends_with(module, name) for name in self._whole)

    def allocate(self) -> None:
        """Once, when the model's layers are made: the memory of all slots, as zeros. Raises
        `ValueError` where a name of `whole` is no layer's."""
        if self.of_experts is not self:
            self.of_experts.allocate()
        shapes = [shape for layer in self.layers for shape in layer.shapes]
        size = self._first + sum(map(_aligned, shapes))
        self.slots = self.slots.new_zeros(len(self.slots), size)
        for index, (layer, tensors) in enumerate(
            zip(self.layers, self._tensors(self.slots), strict=True)
        ):
            layer.bind(index, tensors)
        places = self.places(self.slots[0]).items()
        found = [
            name for name, place in places if place.weight and place.weight.is_whole is not None
        ]
        for name in self._whole:
            if not any(_ends_with(module, name) for module in (*found, *self.elsewhere)):
                raise ValueError(
                    f"lora_modules_to_save: the model has no linear layer or embedding {name!r}, "
                    "and no other weights change with the adapter"
                )

    def places(self, slot: torch.Tensor) -> dict[str, Place]:
        """In memory that is laid out as one of `slots`: [elements]."""
        found: dict[str, Place] = {}
        each = zip(self.layers, self._tensors(slot[None]), strict=True)
        for layer, tensors in in_turns(each, LAYERS_PER_TURN):
            found.update(layer.places([tensor[0] for tensor in tensors]))
        return found

    def copy_behind(self, slot: int) -> None:
        """Once an adapter is in this slot: bring its `a` behind the bases' weights. Enqueues."""
        found = [each for each in self.layers if isinstance(each, LoRALayer)]
        pairs = [
            (each.behind[slot - 1], each.weights.a[slot])
            for each in found
            if each.behind is not None
        ]
        if pairs:
            targets, sources = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(targets, sources)

    def mark(self, slot: torch.Tensor) -> None:
        """Say in memory as one of `slots`, in which an adapter is, what it has of each layer."""
        each = zip(self.layers, self._tensors(slot[None]), strict=True)
        for index, (layer, tensors) in enumerate(in_turns(each, LAYERS_PER_TURN)):
            slot[index] = layer.kind(tensors)

    @property
    def _first(self) -> int:
        """Where the tensors begin in a slot."""
        return _aligned((len(self.layers),))

    def _tensors(self, slots: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Each layer's tensors [n, *shape], as views of slots [n, elements]."""
        first = self._first
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
        self.rows = None
        if row_slots is not None:
            self.rows = self.ops.gather_rows(row_slots, self.slots[:, : len(self.layers)])


def _ends_with(module: str, name: str) -> bool:
    return f".{module}".endswith(f".{name}")


def _aligned(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT


class LoRALayer:
    """The adapters of one linear layer. Its `weights` are there after `LoRALayers.allocate`.

    num_rows: the product's outputs here, of which there may be more than the shape's, as padding.
    Set by the layer: `orders`, part -> output i is the checkpoint's output orders[part][i];
    `base`, its tensors `weight` and `bias`, of all parts.
    """

    weights: LoRAWeights
    behind: torch.Tensor | None = None  # the base's rows [num_slots, parts * max_rank, in]

    def __init__(self, owner: LoRALayers, shape: LinearShape, num_rows: int) -> None:
        self._owner = owner
        self.shape = shape
        self.orders: dict[str, torch.Tensor] = {}
        self.base: Mapping[str, torch.Tensor] = {}
        rank = owner.max_rank
        self._whole = [name for name in shape.parts if owner.has_whole(name)]
        sizes = [(shape.sizes[name], shape.num_columns) for name in self._whole]
        self.shapes: list[tuple[int, ...]] = [
            *((len(shape.parts) * rank, shape.num_columns), (num_rows, rank)),
            *((num_rows,), (num_rows,)),
            *((1,) for _ in sizes),
            *sizes,
        ]

    def extend(self, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replace the base's tensors, not loaded yet, by the first rows of longer ones, with `a`
        behind, and return these: the product by them is what `delta` is added to. Returns the
        base's where there is no room."""
        (size, _), num_slots, out = (
            self.shapes[0],
            len(self._owner.slots) - 1,
            self.shape.out_features,
        )
        if self._whole or num_slots * size > out * MOST_BEHIND:
            return base
        longer = {
            name: each.new_zeros(out + num_slots * size, *each.shape[1:])
            for name, each in base.items()
        }
        base.update({name: each[:out] for name, each in longer.items()})
        self.behind = longer["weight"][out:].unflatten(0, (num_slots, size))
        return longer

    def bind(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        a, b, bias, gain, *whole = tensors
        sizes = [*self.shape.sizes.values()]
        first = dict(zip(self.shape.parts, accumulate(sizes, initial=0), strict=False))
        self.weights = LoRAWeights(
            *(a, b, bias, gain, (*sizes[:-1], sizes[-1] + b.shape[1] - sum(sizes)), index),
            tuple(
                WholeWeights(is_there, weight, first[name])
                for name, (is_there, weight) in self._by_name(whole).items()
            ),
        )

    def _by_name(self, whole: Sequence[torch.Tensor]) -> dict[str, Sequence[torch.Tensor]]:
        num = len(self._whole)
        pairs = zip(whole[:num], whole[num:], strict=True)
        return dict(zip(self._whole, pairs, strict=True))

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        a, b, bias, gain, *whole = tensors
        shape, sizes, rank = self.shape, self.shape.sizes, self._owner.max_rank
        ends = list(accumulate(sizes.values()))
        columns = shape.shard.columns or ALL
        for part, (name, start, end) in enumerate(zip(sizes, [0, *ends], ends, strict=False)):
            weight, base_bias = (self.base.get(kind) for kind in ("weight", "bias"))
            is_whole, its = self._by_name(whole).get(name, (None, None))
            rows = self._rows(name)
            yield name, Place(
                in_features=shape.in_features,
                out_features=shape.parts[name],
                a=a[part * rank : (part + 1) * rank],
                b=b[start:end],
                columns=columns,
                rows=rows,
                bias=bias[start:end] if shape.shard.has_bias else None,
                gain=gain[start:end],
                takes_bias=True,
                base_bias=None if base_bias is None else base_bias[start:end],
                weight=WeightPart(
                    (shape.parts[name], shape.in_features), rows, columns,
                    None if weight is None else weight[start:end], its, is_whole,
                ),
            )  # fmt: skip

    def _rows(self, name: str) -> torch.Tensor | None:
        order = self.orders.get(name)
        if order is None and self.shape.shard.rows is None:
            return None
        if order is None:
            order = torch.arange(self.shape.parts[name])
        return torch.cat([order[rows] for rows in self.shape.rows(name)])

    def kind(self, tensors: Sequence[torch.Tensor]) -> int:
        _, b, bias, gain, *whole = tensors
        has_whole = any(bool(each.any()) for each in whole[: len(self._whole)])
        if bias.any() or gain.any():
            return 2
        return int(has_whole or bool(b.any()))

    def delta(self, x: torch.Tensor) -> Delta | None:
        """Begin the rows' delta of a product of x [T, in], before the product: both begin early so.
        None: no row of the pass that runs has an adapter."""
        rows = self._owner.rows
        if rows is None:
            return None
        ops, weights = self._owner.ops, self.weights
        shrunk = ops.shrink(x, weights, rows) if self.behind is None else None
        return Delta(ops, weights, rows, x, shrunk)

    def add(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The product [T, out] of x [T, in], with the rows' deltas."""
        delta = self.delta(x)
        return product if delta is None else delta.add(product)


@dataclass(frozen=True, slots=True)
class Delta:
    """The adapters' part of one product, as far as it is known without it."""

    ops: LoRAOps
    weights: LoRAWeights
    rows: AdapterRows
    x: torch.Tensor
    shrunk: torch.Tensor | None  # None: the product has it, by a base that is `LoRALayer.extend`ed

    def add(self, product: torch.Tensor) -> torch.Tensor:
        """To the product, [T, out]; in place, unless it has more columns."""
        self._replace(product)
        return self.ops.expand(product, self.shrunk, self.weights, self.rows)

    def add_swiglu(self, product: torch.Tensor) -> torch.Tensor:
        """`Ops.swiglu` of the product with the adapters' part."""
        self._replace(product)
        return self.ops.expand_swiglu(product, self.shrunk, self.weights, self.rows)

    def _replace(self, product: torch.Tensor) -> None:
        if self.weights.whole:
            self.ops.replace(product, self.x, self.weights, self.rows)
