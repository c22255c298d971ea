"""Quantised experts on CUDA, by the kernel of 16-bit experts, which dequantises in registers."""

from __future__ import annotations

from dataclasses import replace

import torch

from asyncllm.kernels.experts.kernel import WIDTH_MULTIPLE, experts_of
from asyncllm.kernels.quant_gemm.matrix import Quantized, dequantize
from asyncllm.kernels.quant_gemm.words import CHUNK
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.linear_method import Weights
from asyncllm.models.layers.ops import ExpertWeights, Normed, Routed
from asyncllm.models.layers.torch_ops import grouped_experts
from asyncllm.models.quantization.cpu_experts import PRODUCTS, CpuExperts, experts_of_matrices
from asyncllm.models.quantization.cuda_kernel import CudaQuantKernel, takes_groups
from asyncllm.models.quantization.scheme import Scheme


class CudaExperts:
    columns_multiple = CHUNK

    def __init__(self, kernel: CudaQuantKernel) -> None:
        self._kernel = kernel
        self._by_torch = CpuExperts()  # for weights that the kernel does not support

    def prepare(self, scheme: Scheme, shape: ExpertsShape, weights: Weights) -> None:
        if _takes(scheme, shape):
            for product in PRODUCTS:
                self._kernel.prepare(scheme, _form(weights, product))

    def apply(
        self, scheme: Scheme, shape: ExpertsShape, weights: Weights, x: Normed, routed: Routed
    ) -> torch.Tensor:
        if not _takes(scheme, shape):
            all_experts = self._by_torch.dequantized(scheme, shape, weights, x.values.dtype)
            return grouped_experts(x.whole(), all_experts, routed)
        matrices = self._matrices(scheme, shape, weights)
        return experts_of(x, *matrices, shape.num_experts, shape.activation, routed)

    def dequantized(
        self, scheme: Scheme, shape: ExpertsShape, weights: Weights, dtype: torch.dtype
    ) -> ExpertWeights:
        if not _takes(scheme, shape):
            return self._by_torch.dequantized(scheme, shape, weights, dtype)
        gate_up, down = (dequantize(each, dtype) for each in self._matrices(scheme, shape, weights))
        return experts_of_matrices(shape, weights, gate_up, down)

    def _matrices(
        self, scheme: Scheme, shape: ExpertsShape, weights: Weights
    ) -> tuple[Quantized, Quantized]:
        gate_up = self._matrix(scheme, weights, "gate_up", shape.hidden_size)
        return gate_up, self._matrix(scheme, weights, "down", shape.size)

    def _matrix(self, scheme: Scheme, weights: Weights, product: str, columns: int) -> Quantized:
        matrix = self._kernel.matrix(scheme, _form(weights, product))
        return replace(matrix, columns=columns)


def _form(weights: Weights, product: str) -> Weights:
    start = f"{product}."
    return {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}


def _takes(scheme: Scheme, shape: ExpertsShape) -> bool:
    sizes = shape.hidden_size, shape.size
    return takes_groups(scheme) and not any(size % WIDTH_MULTIPLE for size in sizes)
