"""Products with quantised matrices against their dequantised form in float32, in every layout.

They run on a GPU, or without one under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.ops import Norm
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.quantization.scheme import Scheme, dequantize, quantize
from tests.engine.test_quantized_experts import write_gpt_oss, write_mixture
from tests.models.dense_sequence import DenseSequence
from tests.models.quantized_files import FORMATS, write_checkpoint
from tests.models.tiny_checkpoints import load

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device"
    ),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 2e-3 if INTERPRETED else 8e-3  # relative, of a product's norm
SCHEMES = [
    Scheme("fp8"),
    Scheme("fp8", group=128),
    Scheme("int8"),
    Scheme("int8", group=32, has_offset=True),
    Scheme("int4", group=128),
    Scheme("int4", group=32, has_offset=True),
    Scheme("int4"),
    Scheme("int4", group=256),
    Scheme("fp4", group=32),
    Scheme("nf4", group=64),
]
# A kernel is compiled for each width, so there are few of them; chunks of codes do not divide 448.
ROWS = [2, 17] if INTERPRETED else [2, 200]
# On a device each takes seconds to compile: what gives other code, in an odd shape.
ODD = SCHEMES if INTERPRETED else [SCHEMES[i] for i in (0, 3, 5, 8)]


def shape_of(scheme: Scheme, is_even: bool) -> tuple[int, int]:
    if is_even:
        return (48, 256) if INTERPRETED else (4096, 4096)
    return 70, 448 if 448 % (scheme.group or 448) == 0 else 3 * scheme.group


def matrices(scheme: Scheme, shape: tuple[int, int], has_bias: bool):
    """The matrix as a kernel takes it, and in float32; its bias."""
    from asyncllm.models.quantization.cuda_kernel import CudaQuantKernel

    torch.manual_seed(0)
    weight, scale = quantize(scheme, torch.randn(shape, device=DEVICE))
    weights = {"weight": weight, "scale": scale}
    if scheme.has_offset:
        weights["offset"] = torch.randn(scale.shape, device=DEVICE) * scale
    if has_bias:
        weights["bias"] = torch.randn(shape[0], device=DEVICE, dtype=DTYPE)
    exact = dequantize(scheme, weight, scale, weights.get("offset"))
    kernel = CudaQuantKernel(DEVICE, DTYPE)
    kernel.prepare(scheme, weights)
    return kernel.matrix(scheme, weights), exact, weights.get("bias", torch.zeros(1)).to(DEVICE)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("scheme", "is_even"), [*((s, True) for s in SCHEMES), *((s, False) for s in ODD)], ids=str
)
def test_products(scheme: Scheme, is_even: bool) -> None:
    from asyncllm.kernels.quant_gemm.gemv import gemv
    from asyncllm.kernels.quant_gemm.matrix import block_of
    from asyncllm.kernels.quant_gemm.matrix import dequantize as dequantize_by_kernel
    from asyncllm.kernels.quant_gemm.skinny_gemm import Tiles, skinny_gemm
    from asyncllm.kernels.records import Normed

    shape = shape_of(scheme, is_even)
    matrix, exact, bias = matrices(scheme, shape, has_bias=not is_even)
    x = torch.randn(max(ROWS), shape[1], device=DEVICE, dtype=DTYPE)
    expected = x.float() @ exact.T + bias.float()
    assert error(dequantize_by_kernel(matrix, DTYPE), exact) < TOLERANCE
    assert error(gemv(Normed(x[:1]), matrix), expected[:1]) < TOLERANCE
    for rows in ROWS:
        assert error(skinny_gemm(x[:rows], matrix), expected[:rows]) < TOLERANCE
    split = skinny_gemm(x[:2], matrix, tiles=Tiles(16, 16, block_of(matrix, 32), 4, 2, 2))
    assert error(split, expected[:2]) < TOLERANCE
    gate, up = expected[:3].chunk(2, dim=1)
    assert error(skinny_gemm(x[:3], matrix, gated=True), F.silu(gate) * up) < 2 * TOLERANCE


@pytest.mark.parametrize(
    ("scheme", "columns"),
    [(Scheme("int4", group=128), 6272), (Scheme("fp4", group=32), 6272), (Scheme("fp8"), 18_560)],
    ids=str,
)
@pytest.mark.parametrize("gated", [False, True])
def test_a_wide_row_is_summed_in_a_loop(scheme: Scheme, columns: int, gated: bool) -> None:
    """It has 10 or 13 blocks, so the last pass is not full."""
    from asyncllm.kernels.quant_gemm.gemv import gemv
    from asyncllm.kernels.records import Normed

    matrix, exact, bias = matrices(scheme, (16, columns), has_bias=True)
    x = torch.randn(1, columns, device=DEVICE, dtype=DTYPE)
    expected = x.float() @ exact.T + bias.float()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    assert error(gemv(Normed(x), matrix, gated), expected) < 2 * TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_ends_a_product_of_one_row(scheme: Scheme) -> None:
    from asyncllm.kernels.quant_gemm.gemv import gemv, gemv_add_norm
    from asyncllm.kernels.records import Norm, Normed

    shape = shape_of(scheme, is_even=True)
    matrix, exact, bias = matrices(scheme, shape, has_bias=True)
    x = torch.randn(1, shape[1], device=DEVICE, dtype=DTYPE)
    squares = torch.rand(1, 37, device=DEVICE)
    normed = Normed(x, squares, 1e-5)
    product = normed.whole().float() @ exact.T + bias.float()
    gate, up = product.chunk(2, dim=1)
    assert error(gemv(normed, matrix, gated=True), F.silu(gate) * up) < 2 * TOLERANCE

    residual = torch.randn(1, shape[0], device=DEVICE, dtype=DTYPE)
    norm = Norm(torch.randn(shape[0], device=DEVICE, dtype=DTYPE), 1e-5)
    total = residual.float() + x.float() @ exact.T + bias.float()
    ours = gemv_add_norm(x, matrix, residual, norm)
    assert error(residual, total) < TOLERANCE
    expected = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.weight.float()
    assert error(ours.whole(), expected) < 2 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_rows_in_8_bits(dtype: torch.dtype) -> None:
    from asyncllm.kernels.quant_gemm.matrix import quantize_rows

    x = torch.randn(5, 300, device=DEVICE, dtype=DTYPE)
    x[3] = 0
    values, scales = quantize_rows(x, dtype)
    made = values.float() * scales
    step = 1 / 250
    if dtype.is_floating_point:
        step = 1 / 6 if INTERPRETED else 1 / 16  # the interpreter does not round to the nearest
    assert (made - x.float()).abs().max() <= x.abs().max() * step
    assert scales[3] == 1 and not values[3].float().any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("weight_dtype", [DTYPE, torch.float32])
def test_a_norm_in_bytes_is_the_norm_quantised(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """To the last bit, and what is kept in 16 bits, too."""
    from asyncllm.kernels.quant_gemm.matrix import quantize_rows
    from asyncllm.kernels.rms_norm.kernel import add_rms_norm, add_rms_norm_in_bytes

    half = torch.float16 if INTERPRETED else torch.bfloat16  # whose rounding is to be the same
    x, residual = torch.randn(2, 9, 300, device=DEVICE, dtype=half)
    x[3] = residual[3] = 0
    weight = torch.randn(300, device=DEVICE, dtype=weight_dtype)
    norm = Norm(weight, 1e-5, in_bytes=dtype)
    x2, residual2 = x.clone(), residual.clone()
    add_rms_norm(x, residual, norm)
    values, scales = quantize_rows(x, dtype)
    values2, scales2 = add_rms_norm_in_bytes(x2, residual2, norm)
    assert torch.equal(residual, residual2) and torch.equal(x, x2)
    assert torch.equal(values.view(torch.int8), values2.view(torch.int8))
    assert torch.equal(scales, scales2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_swiglu_in_bytes_is_swiglu_quantised(dtype: torch.dtype) -> None:
    from asyncllm.kernels.quant_gemm.matrix import quantize_rows
    from asyncllm.kernels.rms_norm.kernel import swiglu, swiglu_in_bytes

    half = torch.float16 if INTERPRETED else torch.bfloat16
    x = torch.randn(9, 600, device=DEVICE, dtype=half)
    x[3] = 0
    out = swiglu(x)
    values, scales = quantize_rows(out, dtype)
    out2, (values2, scales2) = swiglu_in_bytes(x, dtype)
    assert torch.equal(out, out2) and torch.equal(scales, scales2)
    assert torch.equal(values.view(torch.int8), values2.view(torch.int8))


@pytest.mark.skipif(not INTERPRETED, reason="in float32: what CUDA has in 16 bits")
@pytest.mark.parametrize("name", ["ct-fp8-channel", "fp8-tensor", "ct-int8"])
def test_a_model_quantises_where_its_products_take_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same logits to the last bit, by fewer launches."""
    from asyncllm.kernels.quant_gemm import matrix
    from asyncllm.models.layers.cuda_ops import CudaOps
    from asyncllm.models.quantization import cuda_kernel

    write_checkpoint(FORMATS[name], tmp_path)
    by_our_kernels(monkeypatch)
    monkeypatch.setattr(cuda_kernel, "SOME_ROWS", 1)
    calls: list[torch.dtype] = []

    def counted(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(dtype)
        return matrix.quantize_rows(x, dtype)

    monkeypatch.setattr(cuda_kernel, "quantize_rows", counted)
    for name in ("add_rms_norm", "swiglu", "swiglu_in_bytes"):
        monkeypatch.setattr(TorchOps, name, getattr(CudaOps, name))
    for dtype in matrix.MOST_IN_16_BITS:
        monkeypatch.setitem(matrix.MOST_IN_16_BITS, dtype, 1)
    with torch.inference_mode():
        fused = logits(tmp_path, DTYPE)
        num_fused = len(calls)
        monkeypatch.setattr(Linear, "in_bytes", None)
        assert torch.equal(fused, logits(tmp_path, DTYPE))
    layers = 3  # all norms but the first one's, and all activations
    assert len(calls) - num_fused - num_fused == 2 * layers - 1 + layers


def by_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncllm.kernels.quant_gemm import gemv
    from asyncllm.kernels.records import Normed
    from asyncllm.models.quantization import select
    from asyncllm.models.quantization.cuda_experts import CudaExperts
    from asyncllm.models.quantization.cuda_kernel import CudaQuantKernel

    for name in ("product", "experts"):  # CUDA's take a norm whose factor is still to come
        plain = getattr(TorchOps, name)
        monkeypatch.setattr(
            TorchOps, name, lambda self, x, *rest, call=plain: call(self, Normed(x.whole()), *rest)
        )
    # The interpreter takes programs one after the other.
    monkeypatch.setattr(gemv, "choose_row_tiles", lambda matrix, gated: gemv.Tiles(64, 128, 4))
    kernel = CudaQuantKernel(DEVICE, DTYPE)
    monkeypatch.setattr(select, "select_kernels", lambda *_: (kernel, CudaExperts(kernel)))


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """A prefill of several rows, then one row: as little as can be, as the interpreter is slow."""
    sequence = DenseSequence(load(folder, dtype=dtype), num_prompt_tokens=3)
    return torch.cat([sequence.logits(ids) for ids in torch.arange(4).split((3, 1))])


@pytest.mark.skipif(not INTERPRETED, reason="in float32: what CUDA has in 16 bits")
@pytest.mark.parametrize("name", ["gptq-order", "ct-w8a16-fp8", "bnb-nf4", "gptq-v2-8"])
def test_a_model_by_these_kernels_is_that_of_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that ends products of one row and of several."""
    with torch.inference_mode():
        write_checkpoint(FORMATS[name], tmp_path)
        expected = logits(tmp_path, DTYPE)
        by_our_kernels(monkeypatch)
        found = logits(tmp_path, DTYPE)
    assert error(found, expected) < TOLERANCE


@pytest.mark.skipif(not INTERPRETED, reason="in float32: what CUDA has in 16 bits")
@pytest.mark.parametrize("name", ["gpt-oss", "fp8-block", "ct-pack-4-zeros", "gptq-v2-8"])
def test_experts_by_these_kernels_are_those_of_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        if name == "gpt-oss":
            write_gpt_oss(tmp_path)
        else:
            write_mixture(FORMATS[name], tmp_path)
        expected = logits(tmp_path, DTYPE)
        by_our_kernels(monkeypatch)
        found = logits(tmp_path, DTYPE)
    assert error(found, expected) < TOLERANCE
