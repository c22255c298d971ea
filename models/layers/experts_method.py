"""How a layer's experts are stored and multiplied by, as linear_method.py does it for a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

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

# (name of the experts in the checkpoint, their weights) -> all that fills them
LoadExperts = Callable[[str, ExpertWeights], Iterator[Load]]


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


class ExpertsMethod(Protocol):
    """Fixed shapes, no host synchronisation: a call can be captured."""

    def create_weights(self, shape: ExpertsShape) -> Weights:
        """Uninitialised tensors on the target device, under names of the method's own."""
        ...

    def loads(self, name: str, shape: ExpertsShape, weights: Weights) -> Iterator[Load]:
        """All that fills the weights of the experts that a checkpoint has below `name`."""
        ...

    def finish(self, weights: Weights) -> None:
        """As `LinearMethod.finish`."""
        ...

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
class UnquantizedExpertsMethod:
    """In the model's dtype, all experts of a layer in one tensor."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops

    def create_weights(self, shape: ExpertsShape) -> Weights:
        experts, hidden, size = shape.num_experts, shape.hidden_size, shape.size
        sizes = {"gate_up": (experts, 2 * size, hidden), "down": (experts, hidden, size)}
        if shape.bias:
            biases = {"gate_up_bias": (experts, 2 * size), "down_bias": (experts, hidden)}
            sizes |= biases  # type: ignore[arg-type]
        return {
            name: torch.empty(each, dtype=self.dtype, device=self.device)
            for name, each in sizes.items()
        }

    def loads(self, name: str, shape: ExpertsShape, weights: Weights) -> Iterator[Load]:
        return shape.load(name, _record(shape, weights))

    def finish(self, weights: Weights) -> None:
        """They are used as they were read."""

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

    def load(name: str, weights: ExpertWeights) -> Iterator[Load]:
        for expert, (gate_up, down_view) in enumerate(
            zip(weights.gate_up, weights.down, strict=True)
        ):
            gate_view, up_view = gate_up.chunk(2)
            views = {gate: gate_view, up: up_view, down: down_view}
            for part, view in views.items():
                yield Load(f"{name}.{expert}.{part}.weight", view)

    return load
