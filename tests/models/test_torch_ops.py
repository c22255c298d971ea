"""The reference kernels against transformers' and float64, on strided views as models pass them."""

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed, SwiGLU
from asyncllm.models.layers.torch_ops import TorchOps
from tests.models.with_epilogue import with_epilogue

OPS = TorchOps()
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 5, 4, 2, 8
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def merged_heads(dtype):
    """(q, k) as views of one merged projection."""
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    return qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS]


def transformers_norm(weight, eps):
    norm = LlamaRMSNorm(len(weight), eps)
    norm.weight.copy_(weight)
    return norm.to(weight.dtype)


@dtypes
def test_rms_norm_of_rows_and_of_heads(dtype):
    weight = torch.randn(HEAD_DIM).to(dtype)
    for view in merged_heads(dtype)[0], torch.randn(TOKENS, 3 * HEAD_DIM).to(dtype)[:, :HEAD_DIM]:
        x, before = view.contiguous(), view.clone()
        out = OPS.rms_norm(x, Norm(weight, 1e-5))
        expected = transformers_norm(weight, 1e-5)(x)
        torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(x, before) and out.dtype == dtype
        with pytest.raises(AssertionError):  # kernels read rows one after the other
            OPS.rms_norm(view, Norm(weight, 1e-5))


@dtypes
def test_centered_norms_are_cohere_s(dtype):
    weight = torch.randn(HEADS, HEAD_DIM)
    reference = CohereLayerNorm((HEADS, HEAD_DIM), 1e-5)
    reference.weight.copy_(weight)
    x = merged_heads(dtype)[0].contiguous()
    out = OPS.rms_norm(x, Norm(weight, 1e-5, centered=True))
    torch.testing.assert_close(out, reference(x), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    rows, residual = torch.randn(2, TOKENS, HEAD_DIM).to(dtype)
    total, norm = rows + residual, Norm(weight[0], 1e-5, centered=True)
    out = with_epilogue(
        OPS, Normed(rows), torch.eye(HEAD_DIM).to(dtype), AddRMSNorm(residual, norm)
    )
    assert torch.equal(residual, total)
    assert torch.equal(out.values, OPS.rms_norm(total, norm))


@dtypes
def test_product_is_added_to_the_residual_and_its_norm_returned(dtype):
    x, residual = torch.randn(TOKENS, 8).to(dtype), torch.randn(TOKENS, 16).to(dtype)
    weight, bias = torch.randn(16, 8).to(dtype), torch.randn(16).to(dtype)
    norm_weight = torch.randn(16).to(dtype)
    total = torch.nn.functional.linear(x, weight, bias) + residual
    expected = transformers_norm(norm_weight, 1e-5)(total)
    out = with_epilogue(OPS, Normed(x), weight, AddRMSNorm(residual, Norm(norm_weight, 1e-5)), bias)
    assert torch.equal(residual, total) and out.squares is None
    torch.testing.assert_close(out.values, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
def test_swiglu_of_a_product(dtype):
    x, weight = torch.randn(TOKENS, 6).to(dtype), torch.randn(12, 6).to(dtype)
    gate, up = (torch.nn.functional.linear(x, half).double() for half in weight.chunk(2))
    expected = (gate / (1 + (-gate).exp()) * up).to(dtype)
    out = with_epilogue(OPS, Normed(x), weight, SwiGLU())
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
def test_no_tokens(dtype):
    norm, empty = Norm(torch.ones(8, dtype=dtype), 1e-5), torch.empty(0, 8, dtype=dtype)
    assert OPS.rms_norm(empty, norm).shape == (0, 8)
    ones = torch.ones(8, 8, dtype=dtype)
    assert with_epilogue(OPS, Normed(empty), ones[:6], SwiGLU()).shape == (0, 3)
    residual = torch.empty(0, 8, dtype=dtype)
    out = with_epilogue(OPS, Normed(empty), ones, AddRMSNorm(residual, norm))
    assert out.values.shape == (0, 8)
