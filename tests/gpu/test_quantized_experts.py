"""Quantised experts by our kernels against their dequantised form in float32.

They run on a GPU, or without one under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncllm.kernels.records import SILU, Activation, Normed, Routed
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.linear_method import Weights
from asyncllm.models.layers.torch_ops import grouped_experts
from asyncllm.models.quantization.cpu_experts import PRODUCTS, CpuExperts
from asyncllm.models.quantization.mxfp4_files import SCHEME as MXFP4
from asyncllm.models.quantization.scheme import Scheme, quantize

pytest.importorskip("triton", reason="Triton is not installed")

from asyncllm.models.quantization.cuda_experts import CudaExperts
from asyncllm.models.quantization.cuda_kernel import CudaQuantKernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device"
    ),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 2e-3 if INTERPRETED else 1e-2  # relative, of the outputs' norm
CLAMPED = Activation("clamped", limit=1.0, alpha=1.702)
# Experts, hidden size, size. gpt-oss has columns that chunks of codes do not divide.
SMALL, GPT_OSS = (4, 160, 96), (4, 2880, 2880)
WIDE = (4, 512, 256)
CASES: list[tuple[Scheme, tuple[int, int, int], Activation, int]] = [
    (MXFP4, SMALL, CLAMPED, 3),
    (Scheme("int4", group=32, has_offset=True), SMALL, SILU, 2),
    (MXFP4, SMALL, CLAMPED, 2),
    (Scheme("nf4", group=64), SMALL, SILU, 2),
    (Scheme("fp8"), SMALL, SILU, 3),
]
if not INTERPRETED:
    CASES = [
        *((MXFP4, GPT_OSS, CLAMPED, tokens) for tokens in (1, 2, 8, 40, 100, 600)),
        *((Scheme("int4", group=128), WIDE, SILU, tokens) for tokens in (1, 20, 600)),
        *((Scheme("int4", group=32, has_offset=True), WIDE, SILU, tokens) for tokens in (2, 5)),
        *((Scheme("fp8"), WIDE, SILU, tokens) for tokens in (1, 20, 600)),
        *((Scheme("fp8", group=128), WIDE, SILU, tokens) for tokens in (2, 5)),
        *((Scheme("int8"), WIDE, SILU, tokens) for tokens in (2, 5)),
        *((Scheme("nf4", group=64), WIDE, SILU, tokens) for tokens in (2, 5)),
    ]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _no_files(*_: Any) -> Iterator[Any]:
    raise AssertionError("no file is read")


def make_shape(sizes: tuple[int, int, int], activation: Activation, bias: bool) -> ExpertsShape:
    return ExpertsShape(*sizes, load=_no_files, bias=bias, activation=activation)


def make_weights(scheme: Scheme, shape: ExpertsShape) -> Weights:
    """The form of random experts, in 4 bits filled up to whole chunks, as a loader leaves it."""
    weights: Weights = {}
    experts, hidden, size = shape.num_experts, shape.hidden_size, shape.size
    for product, rows, columns in (("gate_up", 2 * size, hidden), ("down", hidden, size)):
        rows *= experts
        padded = -(-columns // 128) * 128 if scheme.bits == 4 else columns
        matrix = torch.zeros(rows, padded, device=DEVICE)
        matrix[:, :columns] = torch.randn(rows, columns, device=DEVICE) / columns**0.5
        weight, scale = quantize(scheme, matrix)
        if scheme.has_exponents:
            scale = torch.randint(118, 122, scale.shape, device=DEVICE).to(torch.uint8)
        else:
            scale = scale[:, : scheme.num_groups(columns)].to(scheme.scale_dtype(DTYPE))
        weights |= {f"{product}.weight": weight, f"{product}.scale": scale.contiguous()}
        if scheme.has_offset:
            weights[f"{product}.offset"] = torch.randn_like(scale) * scale
        if shape.bias:
            weights[f"{product}.bias"] = torch.randn(rows, device=DEVICE).to(DTYPE)
    return weights


@pytest.mark.parametrize(("scheme", "sizes", "activation", "num_tokens"), CASES, ids=str)
def test_equals_the_dequantised_experts(
    scheme: Scheme, sizes: tuple[int, int, int], activation: Activation, num_tokens: int
) -> None:
    """And that those are the same before and after they are prepared for the kernels."""
    shape = make_shape(sizes, activation, bias=activation is CLAMPED)
    weights = make_weights(scheme, shape)
    exact = CpuExperts().dequantized(scheme, shape, weights, torch.float32)
    kernel = CudaExperts(CudaQuantKernel(DEVICE, DTYPE))
    kernel.prepare(scheme, shape, weights)
    again = kernel.dequantized(scheme, shape, weights, DTYPE)
    for product in PRODUCTS:
        torch.testing.assert_close(
            getattr(again, product).float(), getattr(exact, product), rtol=8e-3, atol=1e-6
        )
    x = torch.randn(num_tokens, shape.hidden_size, device=DEVICE).to(DTYPE)
    gates, ids = torch.rand(num_tokens, shape.num_experts, device=DEVICE).topk(2)
    routed = Routed(ids, gates)
    ours = kernel.apply(scheme, shape, weights, Normed(x), routed).float()
    biases = [None if b is None else b.float() for b in (exact.gate_up_bias, exact.down_bias)]
    whole = type(exact)(exact.gate_up, exact.down, *biases, activation)
    expected = grouped_experts(x.float(), whole, routed)
    assert ((ours - expected).norm() / expected.norm()).item() < TOLERANCE
