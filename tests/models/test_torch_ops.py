"""The reference kernels against transformers' and float64, on strided views as models pass them."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from asyncllm.models.layers.torch_ops import TorchOps

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
    for x in merged_heads(dtype)[0], torch.randn(TOKENS, 3 * HEAD_DIM).to(dtype)[:, :HEAD_DIM]:
        before = x.clone()
        out = OPS.rms_norm(x, weight, 1e-5)
        expected = transformers_norm(weight, 1e-5)(x)
        torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(x, before) and out.dtype == dtype


@dtypes
def test_add_rms_norm_updates_both(dtype):
    x, residual = torch.randn(2, TOKENS, 16).to(dtype)
    weight = torch.randn(16).to(dtype)
    total = x + residual
    expected = transformers_norm(weight, 1e-5)(total)
    OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(x, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
def test_silu_and_mul(dtype):
    gate_up = torch.randn(TOKENS, 12).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = (gate / (1 + (-gate).exp()) * up).to(dtype)
    out = OPS.silu_and_mul(gate_up)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
def test_no_tokens(dtype):
    weight, empty = torch.ones(8, dtype=dtype), torch.empty(0, 8, dtype=dtype)
    assert OPS.rms_norm(empty, weight, 1e-5).shape == (0, 8)
    assert OPS.silu_and_mul(empty).shape == (0, 4)
