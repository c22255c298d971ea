"""Multi-head latent attention (MLA): keys and values come from one latent vector per token.

A head's value, and the first part of its key, are projections of the latent. The second part of the
key, the only one that rotates, is shared by all heads. If attention takes latents, pages hold
these: q is multiplied by the projection to keys, and the output by the projection to values.
Otherwise each head's keys and values are computed and kept in pages, which takes tens of times the
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from asyncllm.attention.base import AttentionLayer, Mixer, RotatedHeads, Rotation
from asyncllm.attention.heads import rotate
from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.norm import RMSNorm
from asyncllm.models.layers.ops import AddRMSNorm, Normed
from asyncllm.models.layers.rotary import HeadOrder

NORM_EPS = 1e-6  # of the latents' norms; the configuration does not matter


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The sizes of a head's parts and of latents. q_rank None: q is projected directly."""

    q_rank: int | None
    kv_rank: int
    plain_dim: int  # the part of a head's q and k that does not rotate
    rotary_dim: int
    v_dim: int
    bias: bool

    @property
    def order(self) -> HeadOrder:
        """The order of entries in the part that rotates."""
        return HeadOrder(self.rotary_dim, self.rotary_dim, interleaved=True)


class LatentAttention:
    """As `Attention`."""

    def __init__(
        self, name: str, layer: AttentionLayer, hidden_size: int, spec: LatentSpec, build: Build
    ) -> None:
        self._spec = spec
        heads, qk_dim = layer.num_heads, spec.plain_dim + spec.rotary_dim
        own = build.mesh.config.share(heads, "num_attention_heads")
        made_dim = spec.plain_dim + spec.v_dim  # of a head's key and value, from the latent

        def rows(part: str, dim: int) -> dict[str, tuple[slice, ...]]:
            return {part: (slice(own.start * dim, own.stop * dim),)}

        order = spec.order.entries()
        one_q = torch.cat((torch.arange(spec.plain_dim), spec.plain_dim + order))
        q_rows = (torch.arange(heads).unsqueeze(1) * qk_dim + one_q).flatten()
        kv_rows = torch.cat((torch.arange(spec.kv_rank), spec.kv_rank + order))
        q_part = "q_proj" if spec.q_rank is None else "q_b_proj"
        self._q_a: Linear | None = None
        self._q_norm: RMSNorm | None = None
        q_in = hidden_size
        if spec.q_rank is not None:
            q_in = spec.q_rank
            self._q_a = Linear(name, {"q_a_proj": q_in}, hidden_size, spec.bias, build)
            self._q_norm = RMSNorm(f"{name}.q_a_layernorm", q_in, NORM_EPS, build)
        q_rows_here = rows(q_part, qk_dim)
        self._q = Linear(name, {q_part: heads * qk_dim}, q_in, False, build, rows=q_rows_here)
        self._q.reorder({f"{name}.{q_part}": q_rows})
        kv_part, latent_size = "kv_a_proj_with_mqa", spec.kv_rank + spec.rotary_dim
        self._kv_a = Linear(name, {kv_part: latent_size}, hidden_size, spec.bias, build)
        self._kv_a.reorder({f"{name}.{kv_part}": kv_rows})
        self._kv_norm = RMSNorm(f"{name}.kv_a_layernorm", spec.kv_rank, NORM_EPS, build)
        kv_parts, kv_rows_here = {"kv_b_proj": heads * made_dim}, rows("kv_b_proj", made_dim)
        self._kv_b = Linear(name, kv_parts, spec.kv_rank, False, build, rows=kv_rows_here)
        out, columns = {"o_proj": hidden_size}, slice(own.start * spec.v_dim, own.stop * spec.v_dim)
        self._o = Linear(name, out, heads * spec.v_dim, spec.bias, build, columns=columns)
        layer = replace(layer, num_heads=own.stop - own.start)
        dim = build.page_dim(qk_dim)
        self.layer = replace(layer, num_kv_heads=layer.num_heads, head_dim=dim)
        if build.keeps_latents:
            self.layer = replace(
                layer, num_kv_heads=1, head_dim=latent_size, latent_dim=spec.kv_rank
            )

    def add(self, x: Normed, rotation: Rotation, mixer: Mixer, end: AddRMSNorm) -> Normed:
        """As `Attention.add`."""
        spec, heads = self._spec, self.layer.num_heads
        q = self._q(x if self._q_a is None else self._latent_q(self._q_a, x))
        q = q.unflatten(1, (heads, -1))  # [T, heads, plain_dim + rotary_dim]
        latent, k_rotated = self._kv_a(x).split([spec.kv_rank, spec.rotary_dim], dim=1)
        k_rotated = k_rotated.unsqueeze(1)  # [T, 1, rotary_dim]
        rotate(q[..., spec.plain_dim :], k_rotated, rotation)
        latent = self._kv_norm(latent.contiguous())
        attend = self._attend_made if self.layer.latent_dim is None else self._attend_latents
        seen = attend(q, latent, k_rotated, mixer).flatten(1)  # of one head it is a view
        return self._o.add(Normed(seen.contiguous()), end)

    def _attend_made(
        self, q: torch.Tensor, latent: torch.Tensor, k_rotated: torch.Tensor, mixer: Mixer
    ) -> torch.Tensor:
        """Attention with keys and values per head: [T, heads, v_dim] from q [T, heads, qk_dim],
        latents [T, kv_rank] and the second part of keys [T, 1, rotary_dim]."""
        spec, heads = self._spec, self.layer.num_heads
        kv = self._kv_b(Normed(latent)).unflatten(1, (heads, -1))
        k_plain, v = kv.split([spec.plain_dim, spec.v_dim], dim=2)
        k = torch.cat((k_plain, k_rotated.expand(-1, heads, -1)), dim=2)
        out = mixer.attend(self.layer, RotatedHeads(q, k, v), None)
        return out.unflatten(1, (heads, -1))[..., : spec.v_dim]

    def _attend_latents(
        self, q: torch.Tensor, latent: torch.Tensor, k_rotated: torch.Tensor, mixer: Mixer
    ) -> torch.Tensor:
        """The same by latents, without keys and values per head."""
        spec, heads = self._spec, self.layer.num_heads
        made = self._kv_b.weights["weight"].unflatten(0, (heads, -1))  # [heads, dims, kv_rank]
        to_keys, to_values = made.split([spec.plain_dim, spec.v_dim], dim=1)
        plain, rotated = q.split([spec.plain_dim, spec.rotary_dim], dim=2)
        q = torch.cat((torch.einsum("thd,hdl->thl", plain, to_keys), rotated), dim=2)
        kv = torch.cat((latent.unsqueeze(1), k_rotated), dim=2)  # [T, 1, kv_rank + rotary_dim]
        out = mixer.attend(self.layer, RotatedHeads(q, kv, kv), None)
        seen = out.unflatten(1, (heads, -1))[..., : spec.kv_rank]
        return torch.einsum("thl,hvl->thv", seen, to_values)

    def _latent_q(self, q_a: Linear, x: Normed) -> Normed:
        assert self._q_norm is not None
        return Normed(self._q_norm(q_a(x)))

    @property
    def linears(self) -> tuple[Linear, ...]:
        q_a = () if self._q_a is None else (self._q_a,)
        return *q_a, self._q, self._kv_a, self._kv_b, self._o

    def loads(self) -> Iterator[Load]:
        for linear in self.linears:
            yield from linear.loads()
        yield from self._kv_norm.loads()
        if self._q_norm is not None:
            yield from self._q_norm.loads()
