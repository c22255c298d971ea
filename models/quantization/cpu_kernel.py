"""GEMMs with quantised matrices on a CPU, by torch's kernels.

`_weight_int4pack_mm` and `_weight_int8pack_mm` multiply 16 bits by 4 or 8, `_int_mm` int8 by int8.
All other codes, groups and sizes are dequantised for each product, as are e4m3 and models in
float32, where torch's kernels only do 1e8 to 1e9 multiplications a second
(docs/log/quantization.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.models.layers.linear_method import Weights, put
from asyncllm.models.layers.ops import Normed
from asyncllm.models.quantization.method import QuantKernel
from asyncllm.models.quantization.scheme import (
    FP8,
    FP8_MAX,
    Scheme,
    dequantize,
    quantize_rows,
    unpack,
)

INT4_GROUPS = (32, 64, 128, 256)  # group sizes that `_weight_int4pack_mm` supports
INT4_ROWS = 16  # it needs a multiple of this many rows
HALF_SCALE = 256.0  # from the difference of the exponents' biases


class CpuQuantKernel(QuantKernel):
    def prepare(self, scheme: Scheme, weights: Weights) -> None:
        rows, is_half = len(weights["weight"]), weights["scale"].dtype.itemsize == 2
        takes = scheme.group in INT4_GROUPS and rows % INT4_ROWS == 0 and is_half
        if scheme.kind == "int4" and takes:
            codes = unpack(weights["weight"]).to(torch.int32)
            scale = weights["scale"]
            offset = weights.get("offset", torch.zeros_like(scale))
            put(weights, "packed", torch._convert_weight_to_int4pack_for_cpu(codes, 1))
            put(weights, "scale_offset", torch.stack((scale.T, offset.T), dim=2).contiguous())
        if scheme.activations == "static":  # merged parts have different scales: take the largest
            weights["input_scale"].fill_(weights["input_scale"].max())

    def product(self, scheme: Scheme, weights: Weights, x: Normed) -> torch.Tensor:
        y = _product(scheme, weights, x.whole())
        return y.add_(weights["bias"]) if "bias" in weights else y


def _product(scheme: Scheme, weights: Weights, values: torch.Tensor) -> torch.Tensor:
    """The product without the bias."""
    weight, scale = weights["weight"], weights["scale"]
    if "order" in weights:
        values = values[:, weights["order"][0]]
    if "packed" in weights and scheme.group is not None:
        return torch._weight_int4pack_mm_for_cpu(
            values.contiguous(), weights["packed"], scheme.group, weights["scale_offset"]
        )
    if scheme.kind == "int8" and scheme.group is None and not scheme.has_offset:
        if scheme.activations is None:
            if values.dtype == torch.float32:
                return F.linear(values, weight.float()) * scale.T
            return torch._weight_int8pack_mm(values, weight, scale[:, 0].to(values.dtype))
        values8, scales = quantize_activations(scheme, weights, values)
        sums = torch._int_mm(values8, weight.T)
        return (sums * scales * scale.T).to(values.dtype)
    if scheme.kind == "fp8" and scheme.group is None:
        small, scales = values, scale.T * HALF_SCALE
        if scheme.activations is not None:
            values8, token_scales = quantize_activations(scheme, weights, values)
            small, scales = values8.to(values.dtype), scales * token_scales
        sums = F.linear(small, as_half(weight).to(values.dtype))
        return (sums * scales).to(values.dtype)
    matrix = dequantize(scheme, weight, scale, weights.get("offset"))
    return F.linear(values, matrix.to(values.dtype))


def as_half(weight: torch.Tensor) -> torch.Tensor:
    """e4m3 / HALF_SCALE in float16, exactly, by shifting bits: ten times as fast as torch's
    conversion."""
    bits = weight.view(torch.int8).to(torch.int16) << 7  # the sign is in two places
    return bits.bitwise_and_(~0x4000).view(torch.float16)


def quantize_activations(
    scheme: Scheme, weights: Weights, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, columns] in 8 bits, and a scale per token, float32 [T, 1]."""
    if scheme.activations == "dynamic":
        return quantize_rows(scheme.kind, x)
    scale = weights["input_scale"][0]
    scaled = x.float() / scale
    if scheme.kind == "fp8":
        values = scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    else:
        values = scaled.round_().clamp_(-128, 127).to(torch.int8)
    return values, scale.expand(len(x), 1).contiguous()
