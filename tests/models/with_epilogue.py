"""A product and its epilogue as `Linear` does them, for tests that hold an `Ops` and a matrix."""

from __future__ import annotations

import torch

from asyncllm.models.layers.ops import Epilogue, Normed, Ops, Out


def with_epilogue(
    ops: Ops,
    x: Normed,
    weight: torch.Tensor,
    epilogue: Epilogue[Out],
    bias: torch.Tensor | None = None,
) -> Out:
    fused = epilogue.fused(ops, x, weight, bias)
    return epilogue.apply(ops, ops.product(x, weight, bias)) if fused is None else fused
