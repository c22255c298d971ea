"""The gated feed-forward of a dense layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.ops import SILU, Activation, AddRMSNorm, Normed, SwiGLU, SwiGLUInBytes


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """`packed`: the checkpoint has gate and up in one tensor."""

    bias: bool = False
    packed: bool = False
    activation: Activation = SILU


class MLP:
    """down(activation(gate(x)) * up(x)), with gate and up in one GEMM."""

    full_read_tokens = 1

    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, spec: MLPSpec, build: Build
    ) -> None:
        size = intermediate_size
        parts = {"gate_proj": size, "up_proj": size}
        own = build.mesh.config.share(size, f"the feed-forward's size at {name},")
        rows: dict[str, tuple[slice, ...]] = {"gate_proj": (own,), "up_proj": (own,)}
        if spec.packed:
            parts = {"gate_up_proj": 2 * size}
            rows = {"gate_up_proj": (own, slice(size + own.start, size + own.stop))}
        self._gate = SwiGLU(spec.activation)
        self.gate_up_proj = Linear(name, parts, hidden_size, spec.bias, build, rows=rows)
        down = {"down_proj": hidden_size}
        self.down_proj = Linear(name, down, size, spec.bias, build, columns=own)

    def add(self, x: Normed, end: AddRMSNorm) -> Normed:
        """Add the output for x [T, hidden_size] to the residual of `end`. Returns its norm."""
        return self.down_proj.add(self.gated(x), end)

    def gated(self, x: Normed) -> Normed:
        """The input of `down_proj`: [T, hidden_size] -> [T, intermediate_size]."""
        in_bytes = self.down_proj.in_bytes
        if in_bytes is None:
            return Normed(self.gate_up_proj.with_epilogue(x, self._gate))
        return self.gate_up_proj.with_epilogue(x, SwiGLUInBytes(self._gate, in_bytes))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up_proj, self.down_proj

    def loads(self) -> Iterator[Load]:
        yield from self.gate_up_proj.loads()
        yield from self.down_proj.loads()

    def finish_loading(self) -> None:
        for linear in self.linears:
            linear.finish_loading()
