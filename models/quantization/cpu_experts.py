"""Quantised experts by torch: on a CPU, one expert after the other.

On a GPU (in float32, or for groups that our kernels do not support) all experts are dequantised for
each product, so that shapes do not depend on the routing.
"""

from __future__ import annotations

import torch

from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.linear_method import Weights, put
from asyncllm.models.layers.ops import ExpertWeights, Normed, Routed
from asyncllm.models.layers.torch_ops import grouped_experts, swiglu
from asyncllm.models.quantization.cpu_kernel import CpuQuantKernel
from asyncllm.models.quantization.scheme import Scheme, dequantize

PRODUCTS = ("gate_up", "down")


class CpuExperts:
    columns_multiple = 1

    def __init__(self) -> None:
        self._kernel = CpuQuantKernel()

    def prepare(self, scheme: Scheme, shape: ExpertsShape, weights: Weights) -> None:
        for product in PRODUCTS:
            each = [_expert(weights, product, shape, i) for i in range(shape.num_experts)]
            form = set(each[0])
            for one in each:
                self._kernel.prepare(scheme, one)
            for name in each[0].keys() - form:
                put(weights, f"{product}.each.{name}", torch.stack([one[name] for one in each]))

    def apply(
        self, scheme: Scheme, shape: ExpertsShape, weights: Weights, x: Normed, routed: Routed
    ) -> torch.Tensor:
        values = x.whole()
        if values.is_cuda:
            all_experts = self.dequantized(scheme, shape, weights, values.dtype)
            return grouped_experts(values, all_experts, routed)
        out = torch.zeros(values.shape, dtype=torch.float32)
        for number in routed.ids.unique().tolist():
            expert = number - routed.first_expert
            if not 0 <= expert < shape.num_experts:
                continue
            token, place = (routed.ids == number).nonzero(as_tuple=True)
            gate_up, down = (_expert(weights, product, shape, expert) for product in PRODUCTS)
            both = self._kernel.product(scheme, gate_up, Normed(values[token]))
            gated = swiglu(both, shape.activation)
            sums = self._kernel.product(scheme, down, Normed(gated))
            out.index_add_(0, token, sums.float() * routed.gates[token, place].unsqueeze(1))
        return out.to(values.dtype)

    def dequantized(
        self, scheme: Scheme, shape: ExpertsShape, weights: Weights, dtype: torch.dtype
    ) -> ExpertWeights:
        def matrix(product: str, columns: int) -> torch.Tensor:
            codes = weights[f"{product}.weight"][:, : columns * scheme.bits // 8]
            scale, offset = weights[f"{product}.scale"], weights.get(f"{product}.offset")
            return dequantize(scheme, codes, scale, offset).to(dtype)

        gate_up, down = matrix("gate_up", shape.hidden_size), matrix("down", shape.size)
        return experts_of_matrices(shape, weights, gate_up, down)


def _expert(weights: Weights, product: str, shape: ExpertsShape, expert: int) -> Weights:
    """An expert's part of a product, as weights of a linear layer."""
    found, start = {}, f"{product}."
    for name, weight in weights.items():
        if name.startswith(f"{start}each."):
            found[name.removeprefix(f"{start}each.")] = weight[expert]
        elif name.startswith(start):
            rows = len(weight) // shape.num_experts
            found[name.removeprefix(start)] = weight[expert * rows : (expert + 1) * rows]
    return found


def experts_of_matrices(
    shape: ExpertsShape, weights: Weights, gate_up: torch.Tensor, down: torch.Tensor
) -> ExpertWeights:
    """gate_up, down: the rows of all experts, as weights are stored."""

    def matrix(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (shape.num_experts, -1)).contiguous()

    def bias(product: str) -> torch.Tensor | None:
        rows = weights.get(f"{product}.bias")
        return None if rows is None else rows.view(shape.num_experts, -1)

    return ExpertWeights(
        matrix(gate_up), matrix(down), bias("gate_up"), bias("down"), shape.activation
    )
