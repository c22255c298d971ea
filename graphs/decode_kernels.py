"""Implementations of the same decode step besides the model's layers, one after another.

Where a size is captured, every implementation that takes it is, and the quickest graph stays
(kernels/autotune.py). The layers take every size, and come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LAYERS = "layers"

# slots int32 [rows] -> outputs, tensors of `rows` rows
DecodeStep = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
# (slots int32 [rows] that graphs read, the graphs' replays) -> seconds that each of them takes
Autotune = Callable[[torch.Tensor, Sequence[Callable[[], None]]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """`step` gives the same outputs as the layers', in the roundings of other kernels."""

    name: str
    step: DecodeStep
    sizes: range  # rows that it takes
