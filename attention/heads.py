"""Rotated heads from a merged projection, in torch: the reference for rope_kv_write.

In half precision the norm is rounded before the multiplication by its weight, as in transformers.
The rotation is computed in float32 and rounded at the end, as CUDA kernels do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.attention.base import AttentionLayer, RotatedHeads, Rotation


def rotated_heads(
    layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim], where q and k are
    normalised, if the layer has q and k norms, and rotated. v is a view. `RotatedHeads` are only
    padded."""
    if isinstance(qkv, RotatedHeads):
        return _padded_q(layer, qkv), _padded(layer, qkv.k), _padded(layer, qkv.v)
    assert rotation is not None
    q, k, v = qkv.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
    norm = layer.head_norm
    if norm is not None:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    rotate(q, k, rotation)
    return q, k, v


def _padded(layer: AttentionLayer, x: torch.Tensor) -> torch.Tensor:
    """[T, heads, dim] -> [T, the layer's KV heads, the layer's head_dim]."""
    more_heads, more_dims = layer.num_kv_heads - x.shape[1], layer.head_dim - x.shape[2]
    return F.pad(x, (0, more_dims, 0, more_heads)) if more_heads or more_dims else x


def _padded_q(layer: AttentionLayer, heads: RotatedHeads) -> torch.Tensor:
    """q, padded to [T, the layer's heads, the layer's head_dim]."""
    q, group = heads.q, layer.num_heads // layer.num_kv_heads
    if q.shape[1:] == (layer.num_heads, layer.head_dim):
        return q
    q = q.unflatten(1, (heads.k.shape[1], -1))
    more_heads = group - q.shape[2], layer.num_kv_heads - q.shape[1]
    return F.pad(q, (0, layer.head_dim - q.shape[3], 0, more_heads[0], 0, more_heads[1])).flatten(
        1, 2
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, centered: bool = False
) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32: a new tensor.

    The norm is rounded before the multiplication by a weight of x's dtype, and after that by one in
    float32. centered: subtract the mean of x first.
    """
    x32 = x.float()
    if centered:
        x32 = x32 - x32.mean(-1, keepdim=True)
    normed = x32 * inverse_rms(x32, eps)
    return normed.to(weight.dtype).mul_(weight).to(x.dtype)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension: [..., size] -> [..., 1], float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def rotate(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> None:
    """Rotate q and k, [tokens, heads, head_dim], in place; rows may be strided."""
    half = rotation.cos_sin.shape[-1] // 2
    table = rotation.cos_sin.index_select(0, rotation.rows).unsqueeze(1)  # [tokens, 1, 2 * half]
    cos, sin = table.split(half, dim=-1)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    for heads in (q, k):
        x = heads.float()
        heads.copy_((x * cos).addcmul_(x.roll(half, dims=-1), sin))
