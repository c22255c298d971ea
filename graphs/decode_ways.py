"""Ways to run the same decode step besides the model's layers, one after another.

Which is quicker depends on the model, the card and the number of rows, so it is measured: where a
size is captured, every way that takes it is, and one graph stays. The layers take every size and
stay unless another way is clearly quicker: what is as quick must not change between two starts,
whose answers may differ with it in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LAYERS = "layers"
LEAST_GAIN = 0.02  # of the layers' time; repeated measurements of one graph differ by less

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


def quickest(seconds: Sequence[float]) -> int:
    """Whose time it is; 0, the layers, where no other is clearly quicker."""
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return best if seconds[best] < seconds[0] * (1 - LEAST_GAIN) else 0
