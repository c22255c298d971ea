"""Ways to run the same decode step besides the model's layers, one after another.

Where a size is captured, every way that takes it is, and the quickest graph stays
(device_trial.py). The layers take every size, and come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LAYERS = "layers"

# slots int32 [rows] -> outputs, tensors of `rows` rows
DecodeStep = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
# (slots int32 [rows] that graphs read, the graphs' replays) -> seconds that each of them takes
Trial = Callable[[torch.Tensor, Sequence[Callable[[], None]]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Way:
    """`step` gives the same outputs as the layers', in the roundings of other kernels."""

    name: str
    step: DecodeStep
    sizes: range  # rows that it takes
