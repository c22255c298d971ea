"""Self-attention: the projections before and after the mixer's `attend`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from asyncllm.attention.base import AttentionLayer, HeadNorm, Mixer, Rotation
from asyncllm.attention.heads import rms_norm
from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.norm import load_norm, norm_weight
from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed
from asyncllm.models.layers.rotary import HeadOrder


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The differences between families.

    packed: the checkpoint has q, k and v in one tensor. qk_norm: norms of q and k before RoPE: an
    RMSNorm over each head, over all heads together, or a layer norm over each head with its "own"
    weights. norm_offset: as for `RMSNorm`. order: of a head's entries, if RoPE is not NeoX-style.
    sinks: attention sinks, a score per head.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    packed: bool = False
    qk_norm: Literal["head", "all", "own"] | None = None
    norm_offset: float | None = None
    order: HeadOrder | None = None
    sinks: bool = False


class Attention:
    """Grouped-query attention with a merged QKV projection."""

    def __init__(
        self,
        name: str,
        layer: AttentionLayer,
        hidden_size: int,
        norm_eps: float,
        spec: AttentionSpec,
        build: Build,
    ) -> None:
        self._name, self._spec, self._ops, self._mesh = name, spec, build.ops, build.mesh
        heads = own_heads(layer, build)
        self._heads, self._num_heads = heads, (layer.num_heads, layer.num_kv_heads)
        q_size, kv_size = (num * layer.head_dim for num in self._num_heads)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        q, k = (features(layer, own) for own in heads)
        rows: dict[str, tuple[slice, ...]] = {"q_proj": (q,), "k_proj": (k,), "v_proj": (k,)}
        if spec.packed:
            parts = {"qkv_proj": q_size + 2 * kv_size}
            behind = (slice(q_size + n + k.start, q_size + n + k.stop) for n in (0, kv_size))
            rows = {"qkv_proj": (q, *behind)}
        self.qkv_proj = Linear(name, parts, hidden_size, spec.qkv_bias, build, rows=rows)
        if spec.order is not None:
            order = spec.order.rows(layer, packed=spec.packed)
            self.qkv_proj.reorder({f"{name}.{part}": index for part, index in order.items()})
        out = {"o_proj": hidden_size}
        self.o_proj = Linear(name, out, q_size, spec.output_bias, build, columns=q)
        layer = replace(layer, num_heads=_count(heads[0]), num_kv_heads=_count(heads[1]))
        self._sizes = [n * layer.head_dim for n in (layer.num_heads, layer.num_kv_heads)]
        self._norms: list[Norm] = []  # of q and of k
        if spec.qk_norm in ("head", "all"):
            sizes = self._sizes if spec.qk_norm == "all" else [layer.head_dim] * 2
            weights = [norm_weight(size, build, spec.norm_offset) for size in sizes]
            self._norms = [Norm(weight, norm_eps) for weight in weights]
        if spec.qk_norm == "own":
            counts = (layer.num_heads, layer.num_kv_heads)
            weights = [norm_weight((n, layer.head_dim), build, 0.0) for n in counts]
            self._norms = [Norm(weight, norm_eps, centered=True) for weight in weights]
        if spec.qk_norm == "head":
            q_norm, k_norm = self._norms
            layer = replace(layer, head_norm=HeadNorm(q_norm.weight, k_norm.weight, norm_eps))
        if spec.sinks:
            layer = replace(layer, sinks=build.empty(layer.num_heads))
        self.layer = layer

    def add(self, x: Normed, rotation: Rotation, mixer: Mixer, end: AddRMSNorm) -> Normed:
        """Add the attention of x [T, hidden_size] to the residual of `end`. Returns its norm."""
        qkv = self.qkv_proj(x)
        if self._spec.qk_norm == "all":
            self._normalise(qkv)
        elif self._spec.qk_norm == "own":
            self._normalise_each(qkv)
        heads = qkv.unflatten(-1, (-1, self.layer.head_dim))  # [T, all heads, head_dim]
        out = Normed(mixer.attend(self.layer, heads, rotation))
        return self.o_proj.add(out, end)

    def _normalise(self, qkv: torch.Tensor) -> None:
        """Normalise q and k over all their heads, in place."""
        q, k, _ = qkv.split([*self._sizes, self._sizes[1]], dim=1)
        if self._mesh.config.tp > 1:
            self._normalise_shares(q, k)
            return
        for part, norm in zip((q, k), self._norms, strict=True):
            part.copy_(self._ops.rms_norm(part.contiguous(), norm))

    def _normalise_each(self, qkv: torch.Tensor) -> None:
        """Normalise each head of q and k, in place."""
        q, k, _ = qkv.split([*self._sizes, self._sizes[1]], dim=1)
        for part, norm in zip((q, k), self._norms, strict=True):
            heads = part.unflatten(1, (-1, self.layer.head_dim))
            heads.copy_(rms_norm(heads, norm.weight, norm.eps, norm.centered))

    def _normalise_shares(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Normalise q and k, each over the heads of all ranks. Ranks have equal numbers of heads;
        several may have the same heads of k."""
        means = [part.float().square().mean(1, keepdim=True) for part in (q, k)]
        all_means = self._mesh.reduce(torch.cat(means, dim=1)).div_(self._mesh.config.tp)
        for part, norm, mean in zip((q, k), self._norms, all_means.split(1, dim=1), strict=True):
            inverse = (mean + norm.eps).rsqrt()
            part.copy_((part.float() * inverse).to(norm.weight.dtype) * norm.weight)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv_proj, self.o_proj

    def loads(self) -> Iterator[Load]:
        yield from self.qkv_proj.loads()
        order = self._spec.order
        is_shared = self._mesh.config.tp > 1
        for part, norm, own, num_heads in zip(
            ("q_norm", "k_norm"), self._norms, self._heads, self._num_heads, strict=False
        ):
            load = load_norm(f"{self._name}.{part}.weight", norm.weight, self._spec.norm_offset)
            if is_shared and self._spec.qk_norm == "all":
                whole = (num_heads * self.layer.head_dim,)
                load = replace(load, part=(features(self.layer, own),), file_shape=whole)
            elif is_shared and self._spec.qk_norm == "own":
                load = replace(load, part=(own,), file_shape=(num_heads, self.layer.head_dim))
            yield load if order is None else order.load(load)
        if self.layer.sinks is not None:
            load = Load(f"{self._name}.sinks", self.layer.sinks)
            if is_shared:
                load = replace(load, part=self._heads[:1], file_shape=self._num_heads[:1])
            yield load
        yield from self.o_proj.loads()


def own_heads(layer: AttentionLayer, build: Build) -> tuple[slice, slice]:
    """This rank's heads of q, and of k and v."""
    mesh = build.mesh.config
    return mesh.share(layer.num_heads, "num_attention_heads"), mesh.kv_share(layer.num_kv_heads)


def features(layer: AttentionLayer, heads: slice) -> slice:
    return slice(heads.start * layer.head_dim, heads.stop * layer.head_dim)


def _count(heads: slice) -> int:
    count: int = heads.stop - heads.start
    return count
