"""GEMMs with quantised matrices on CUDA.

1 row        8- or 4-bit weights times 16-bit inputs, with a fused epilogue
some rows    the same, on tensor cores
more rows    FP8 by rows: cuBLAS with inputs in e4m3; int8 by rows, many rows: cuBLAS with inputs in
             int8; others: dequantised to 16 bits, for cuBLAS

Inputs are not quantised for few rows, where that saves no time: this is more exact. Matrices whose
groups `takes_groups` excludes are dequantised by torch for each product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from asyncllm.kernels.quant_gemm.gemv import gemv, gemv_add_norm
from asyncllm.kernels.quant_gemm.matrix import (
    FORMATS,
    MOST_IN_16_BITS,
    Quantized,
    dequantize,
    quantize_rows,
)
from asyncllm.kernels.quant_gemm.skinny_gemm import skinny_gemm
from asyncllm.kernels.quant_gemm.words import CHUNK, TILE_ROWS, num_words, to_words
from asyncllm.models.layers.linear_method import Weights, put
from asyncllm.models.layers.ops import Epilogue, FusedProducts, Norm, Normed, Out
from asyncllm.models.quantization.scheme import CODE_VALUES, FP8_MAX, Scheme, unpack
from asyncllm.models.quantization.scheme import dequantize as dequantize_torch

SOME_ROWS = 128  # with more, dequantising the matrix to 16 bits is faster
PREPARED_ROWS = 4096  # at a time, to limit memory
FP8_ALIGNMENT = 16  # of both dimensions of a matrix, for cuBLAS's FP8 and int8 GEMMs
LEAST_GROUP = 16  # columns that a tensor core instruction takes


class CudaQuantKernel:
    """dtype: the model's, in 16 bits."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tables = {
            kind: torch.tensor(CODE_VALUES[kind], device=device) for kind in ("fp4", "nf4")
        }

    def prepare(self, scheme: Scheme, weights: Weights) -> None:
        weight = weights["weight"]
        if scheme.bits == 4 and takes_groups(scheme):
            rows, columns = len(weight), weight.shape[1] * 2
            if rows % TILE_ROWS == 0 and columns % CHUNK == 0:
                words = weight.view(torch.int32)
            else:  # `weight` is kept, as a reload writes it again
                shape = num_words(rows, columns)
                words = put(weights, "words", weight.new_zeros(shape, dtype=torch.int32))
            for part, target in zip(
                weight.split(PREPARED_ROWS), words.split(PREPARED_ROWS), strict=True
            ):
                target.copy_(to_words(unpack(part)))
        if scheme.activations == "static":  # merged parts have different scales: take the largest
            weights["input_scale"].fill_(weights["input_scale"].max())

    def matrix(self, scheme: Scheme, weights: Weights) -> Quantized:
        weight, group = weights["weight"], scheme.group
        columns = weight.shape[1] * 8 // scheme.bits
        if scheme.bits == 4:
            words = weights.get("words")
            weight = weight.view(torch.int32) if words is None else words[: len(weight)]
        if scheme.has_offset and group is None:
            group = -(-columns // CHUNK) * CHUNK
        scale = weights["scale"]
        return Quantized(
            weight,
            scale.view(torch.int32) if scheme.has_exponents else scale,
            weights.get("offset"),
            self._tables.get(scheme.kind),
            weights.get("bias"),
            group,
            columns,
            FORMATS[scheme.kind],
        )

    def in_bytes(self, scheme: Scheme, weights: Weights) -> torch.dtype | None:
        by_row = scheme.group is None and not scheme.has_order and _aligned(weights)
        if not by_row or scheme.activations is None:
            return None
        if scheme.kind == "fp8":  # a static scale is not per row
            return torch.float8_e4m3fn if scheme.activations == "dynamic" else None
        return torch.int8 if scheme.kind == "int8" else None

    def product(self, scheme: Scheme, weights: Weights, x: Normed) -> torch.Tensor:
        num_rows = x.values.shape[0]
        if not takes_groups(scheme):
            return self._dequantized(scheme, weights, _ordered(weights, x).whole())
        matrix = self.matrix(scheme, weights)
        if num_rows == 1:
            return gemv(_ordered(weights, x), matrix)
        values = _ordered(weights, x).whole()
        if _in_fp8(scheme, weights, num_rows):
            return self._fp8(scheme, weights, values, x.in_bytes)
        if num_rows <= SOME_ROWS:
            return skinny_gemm(values, matrix)
        if scheme.kind == "int8" and scheme.activations is not None and _aligned(weights):
            values8, scales = x.in_bytes or quantize_rows(values, torch.int8)
            sums = torch._int_mm(values8, matrix.weight.T)
            return _with_bias((sums * scales * matrix.scale.T).to(values.dtype), matrix.bias)
        # Not by `Ops`: its GEMMs keep weights to be timed on, and this one lives for one product.
        return F.linear(values, dequantize(matrix, values.dtype), matrix.bias)

    def fused(
        self, scheme: Scheme, weights: Weights, x: Normed, epilogue: Epilogue[Out]
    ) -> Out | None:
        num_rows = x.values.shape[0]
        in_cublas = num_rows > SOME_ROWS or _in_fp8(scheme, weights, num_rows)
        if in_cublas or not takes_groups(scheme):
            return None
        ops = _InKernel(self.matrix(scheme, weights))
        return epilogue.fused(ops, _ordered(weights, x), weights["weight"], weights.get("bias"))

    def _fp8(
        self,
        scheme: Scheme,
        weights: Weights,
        x: torch.Tensor,
        in_bytes: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        if scheme.activations == "static":
            scale = weights["input_scale"][0]
            values8 = (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            scales = scale.expand(len(x), 1).contiguous()
        else:
            values8, scales = in_bytes or quantize_rows(x, torch.float8_e4m3fn)
        y = torch._scaled_mm(
            values8, weights["weight"].T, scales, weights["scale"].T, out_dtype=x.dtype
        )
        return _with_bias(y, weights.get("bias"))

    def _dequantized(self, scheme: Scheme, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        matrix = dequantize_torch(
            scheme, weights["weight"], weights["scale"], weights.get("offset")
        )
        return F.linear(x, matrix.to(x.dtype), weights.get("bias"))


@dataclass(frozen=True, slots=True)
class _InKernel(FusedProducts):
    """Fused products with a quantised matrix instead of the `weight` argument."""

    matrix: Quantized

    def product_swiglu(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.values.shape[0] == 1:
            return gemv(x, self.matrix, gated=True)
        return skinny_gemm(x.whole(), self.matrix, gated=True)

    def product_add_rms_norm(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed | None:
        if x.values.shape[0] > 1:
            return None
        return gemv_add_norm(x.whole(), self.matrix, residual, norm)


def takes_groups(scheme: Scheme) -> bool:
    """Whether our kernels support the group size."""
    if scheme.group is None or scheme.group % CHUNK == 0:
        return True
    if scheme.bits == 4:
        return CHUNK % scheme.group == 0 and scheme.group >= LEAST_GROUP
    return scheme.group % LEAST_GROUP == 0


def _ordered(weights: Weights, x: Normed) -> Normed:
    """The input with its columns in the weight's order."""
    if "order" not in weights:
        return x
    return Normed(x.values[:, weights["order"][0]], x.squares, x.eps)


def _in_fp8(scheme: Scheme, weights: Weights, num_rows: int) -> bool:
    """Whether inputs are quantised to e4m3, too."""
    is_by_row = (
        scheme.kind == "fp8"
        and scheme.group is None
        and num_rows > MOST_IN_16_BITS[torch.float8_e4m3fn]
    )
    return is_by_row and scheme.activations is not None and _aligned(weights)


def _aligned(weights: Weights) -> bool:
    return all(size % FP8_ALIGNMENT == 0 for size in weights["weight"].shape)


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y.add_(bias)
