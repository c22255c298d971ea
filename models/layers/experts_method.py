"""How a layer's experts are stored and multiplied by, as linear_method.py does it for a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.base import Load
from asyncllm.models.layers.linear_method import Weights
from asyncllm.models.layers.ops import (
    SILU,
    Activation,
    ExpertAdapters,
    ExpertWeights,
    Normed,
    Ops,
    Routed,
)

GROUPED_ROW_BYTES = 16  # of which torch's grouped product wants rows to be a multiple


@dataclass(frozen=True, slots=True)
class ExpertsShare:
    """The part of a layer's experts that one rank has: some of them, or of each a range of its
    inner size; then the ranks' sums are summed, and only one of them `has_down_bias`."""

    num_experts: int  # in the checkpoint
    experts: slice
    full_size: int
    size: slice
    has_down_bias: bool

    @property
    def is_whole(self) -> bool:
        return (self.experts, self.size) == (slice(0, self.num_experts), slice(0, self.full_size))


# (name of the experts in the checkpoint, this rank's weights, its share) -> all that fills them
LoadExperts = Callable[[str, ExpertWeights, ExpertsShare], Iterator[Load]]


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """`load`: where a family's checkpoint has the experts."""

    num_experts: int
    hidden_size: int
    size: int  # of one expert
    load: LoadExperts
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names below an expert
    interleaved: bool = False  # files that stack the experts have gates and ups by turns
    bias: bool = False
    activation: Activation = SILU

    def share(self, mesh: MeshConfig) -> ExpertsShare:
        """Raises `ModelLoadError` where the ranks cannot divide them."""
        experts, size, has_down_bias = slice(0, self.num_experts), slice(0, self.size), True
        if mesh.by_expert:
            experts = mesh.expert_share(self.num_experts)
        else:
            size = mesh.share(self.size, "the size of an expert")
            has_down_bias = mesh.place == 0
        return ExpertsShare(self.num_experts, experts, self.size, size, has_down_bias)

    def own(self, mesh: MeshConfig, dtype: torch.dtype) -> ExpertsShape:
        """The experts that a rank has, by their places and sizes there, in memory of this dtype.
        Raises `ModelLoadError` where the ranks cannot divide them."""
        if mesh.tp * mesh.dp == 1:
            return self
        share = self.share(mesh)
        experts, size = (part.stop - part.start for part in (share.experts, share.size))
        if size != self.size and size * dtype.itemsize % GROUPED_ROW_BYTES:
            raise ModelLoadError(
                f"tensor_parallel_size {mesh.tp} makes experts of size {self.size} rows of "
                f"{size}, which are no multiple of {GROUPED_ROW_BYTES} bytes"
            )
        return replace(self, num_experts=experts, size=size)


class ExpertsMethod(Protocol):
    """Fixed shapes, no host synchronisation: a call can be captured. `shape`: of all ranks' experts
    where weights are made and loaded, of this rank's where they are used."""

    def create_weights(self, shape: ExpertsShape) -> Weights:
        """Uninitialised tensors on the target device, under names of the method's own."""
        ...

    def loads(self, name: str, shape: ExpertsShape, weights: Weights) -> Iterator[Load]:
        """All that fills the weights of the experts that a checkpoint has below `name`."""
        ...

    def finish(self, shape: ExpertsShape, weights: Weights) -> None:
        """As `LinearMethod.finish`."""
        return None

    def apply(
        self,
        shape: ExpertsShape,
        weights: Weights,
        x: Normed,
        routed: Routed,
        adapters: ExpertAdapters | None,
    ) -> torch.Tensor:
        """As `Ops.experts`."""
        ...


@dataclass(frozen=True, slots=True)
class UnquantizedExpertsMethod(ExpertsMethod):
    """In the model's dtype, all experts of a layer in one tensor."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    mesh: MeshConfig

    def create_weights(self, shape: ExpertsShape) -> Weights:
        own, share = shape.own(self.mesh, self.dtype), shape.share(self.mesh)
        experts, hidden, size = own.num_experts, own.hidden_size, own.size
        sizes: dict[str, tuple[int, ...]] = {
            "gate_up": (experts, 2 * size, hidden),
            "down": (experts, hidden, size),
        }
        if shape.bias:
            sizes["gate_up_bias"] = experts, 2 * size
        if shape.bias and share.has_down_bias:
            sizes["down_bias"] = experts, hidden
        return {
            name: torch.empty(each, dtype=self.dtype, device=self.device)
            for name, each in sizes.items()
        }

    def loads(self, name: str, shape: ExpertsShape, weights: Weights) -> Iterator[Load]:
        return shape.load(name, _record(shape, weights), shape.share(self.mesh))

    def apply(
        self,
        shape: ExpertsShape,
        weights: Weights,
        x: Normed,
        routed: Routed,
        adapters: ExpertAdapters | None,
    ) -> torch.Tensor:
        return self.ops.experts(x, _record(shape, weights), routed, adapters)


def _record(shape: ExpertsShape, weights: Weights) -> ExpertWeights:
    biases = weights.get("gate_up_bias"), weights.get("down_bias")
    return ExpertWeights(weights["gate_up"], weights["down"], *biases, shape.activation)


def load_each(gate: str, up: str, down: str) -> LoadExperts:
    """A tensor for each expert and product: name.expert.gate.weight and so on."""

    def load(name: str, weights: ExpertWeights, share: ExpertsShare) -> Iterator[Load]:
        hidden = weights.down.shape[1]
        wide, narrow = (share.full_size, hidden), (hidden, share.full_size)
        rows: tuple[slice, ...] = ()
        columns: tuple[slice, ...] = ()
        if not share.is_whole:
            rows, columns = (share.size,), (slice(None), share.size)
        own = range(share.num_experts)[share.experts]
        for place, expert in enumerate(own):
            gate_view, up_view = weights.gate_up[place].chunk(2)
            at = f"{name}.{expert}"
            yield Load(f"{at}.{gate}.weight", gate_view, rows, file_shape=wide)
            yield Load(f"{at}.{up}.weight", up_view, rows, file_shape=wide)
            yield Load(f"{at}.{down}.weight", weights.down[place], columns, file_shape=narrow)
        for expert in set(range(share.num_experts)) - {*own}:  # known, and not read
            for part, shape in ((gate, wide), (up, wide), (down, narrow)):
                nothing = weights.down.new_empty(0, shape[1])
                yield Load(f"{name}.{expert}.{part}.weight", nothing, (slice(0),), file_shape=shape)

    return load
