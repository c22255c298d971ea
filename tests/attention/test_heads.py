"""Normalised and rotated heads against transformers and float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from asyncllm.attention.base import AttentionLayer, HeadNorm, Rotation
from asyncllm.attention.heads import rotated_heads

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 5, 4, 2, 8
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


def make_layer(norm: HeadNorm | None = None) -> AttentionLayer:
    return AttentionLayer(0, HEADS, KV_HEADS, HEAD_DIM, 1.0, None, norm)


def make_qkv(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)


def make_rotation(row_dtype: torch.dtype = torch.int32) -> Rotation:
    angles = torch.rand(50, HEAD_DIM // 2) * 6
    rows = torch.tensor([0, 49, 7, 7, 1], dtype=row_dtype)
    return Rotation(rows, torch.cat((angles.cos(), angles.sin()), dim=-1))


def in_float64(qkv: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' rotation of the q and k heads."""
    table = rotation.cos_sin[rotation.rows.long()]
    cos, sin = (half.repeat(1, 2) for half in table.chunk(2, dim=-1))
    q, k = qkv[:, :HEADS].double(), qkv[:, HEADS : HEADS + KV_HEADS].double()
    return apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("row_dtype", [torch.int32, torch.int64])
def test_rotation_equals_transformers(dtype: torch.dtype, row_dtype: torch.dtype) -> None:
    qkv, rotation = make_qkv(dtype), make_rotation(row_dtype)
    values = qkv[:, HEADS + KV_HEADS :].clone()
    expected = in_float64(qkv, rotation)
    q, k, v = rotated_heads(make_layer(), qkv, rotation)
    for out, want in zip((q, k), expected, strict=True):
        torch.testing.assert_close(out, want.to(dtype), atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(v, values)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_heads_are_normalised_before_the_rotation(dtype: torch.dtype) -> None:
    norms = [LlamaRMSNorm(HEAD_DIM, 1e-5).to(dtype) for _ in range(2)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.randn(HEAD_DIM))
    q_norm, k_norm = norms
    head_norm = HeadNorm(q_norm.weight.detach(), k_norm.weight.detach(), 1e-5)
    qkv, rotation = make_qkv(dtype), make_rotation()
    with torch.no_grad():
        parts = [q_norm(qkv[:, :HEADS]), k_norm(qkv[:, HEADS : HEADS + KV_HEADS])]
    expected = in_float64(torch.cat([*parts, qkv[:, HEADS + KV_HEADS :]], dim=1), rotation)
    q, k, _ = rotated_heads(make_layer(head_norm), qkv.clone(), rotation)
    for out, want in zip((q, k), expected, strict=True):
        torch.testing.assert_close(out, want.to(dtype), atol=2 * TOLERANCE[dtype], rtol=0)
