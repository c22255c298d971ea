"""How the outputs of a product of one row are divided among programs. No Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """features: outputs per program; block: columns of the weights at a time."""

    features: int
    block: int
    num_warps: int


def num_squares(weight: torch.Tensor) -> int:
    """Parts that `gemv_add_norm` leaves the next norm's factor in, a program each."""
    return -(-len(weight) // choose_tiles(weight.shape[1], gated=False, adds=True).features)


def choose_tiles(in_features: int, gated: bool, adds: bool) -> Tiles:
    """By sweeps on an H200, weights from memory (docs/log/gemm.md)."""
    if gated:
        return Tiles(1, 4096, 8) if in_features >= 4096 else Tiles(2, 1024, 2)
    if in_features < 4096:
        return Tiles(4, 512, 2)
    if in_features >= 8192:  # other tiles spill registers
        return Tiles(4, 1024, 4)
    return Tiles(8, 1024, 4) if adds else Tiles(8, 512, 2)
