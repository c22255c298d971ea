"""Tensor parallelism of transformers models, by the library's plan (`tp_plan`).

The plan names modules and parameters, and how each is divided. A rank's module has a shard of the
weights and runs its own code, with calls of the mesh before and after it. Modules of a plan depend
on each other: `rowwise` takes the divided output of `colwise`. So a model is refused if a size
cannot be divided, unless the module's input and output are whole: then each rank has all of it, as
of modules that the plan does not name.

    colwise                 rows of the weight; the output stays divided
    colwise_gather_output   the same, gathered
    rowwise                 columns, for a divided input; outputs are summed
    rowwise_split_input     the same, for a whole input
    packed_colwise/rowwise  in each half of a weight, gate and up
    moe_tp_experts          the experts' outputs are summed
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asyncllm.mesh_config import MeshConfig
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.models.transformers_attention import Unservable
from asyncllm.models.transformers_modules import FUSED

ON_RANK = "asyncllm_on_rank"  # the attribute of a module that calls the mesh
ROW_BYTES = 16  # torch's grouped GEMM needs rows of a multiple of this
# Styles where each rank has all; they only matter for gradients, or save memory.
WHOLE = {
    "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params",
    "embedding_rowwise", "embedding_colwise",
}  # fmt: skip
GATHERED = {"colwise_gather_output", "colwise_rep"}
SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
SUMMED = {"rowwise"} | SPLIT_INPUT
DIVIDED = {"colwise", "packed_colwise", "packed_rowwise"} | GATHERED | SUMMED
EXPERTS = "moe_tp_experts"


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """A rank's `ranges` of dimension `dim` of a parameter. shape: of the whole parameter."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[slice, ...]

    @property
    def size(self) -> int:
        return sum(each.stop - each.start for each in self.ranges)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[part_of(self.dim, each)] for each in self.ranges], self.dim)

    def within(self, start: int, stop: int) -> Iterator[tuple[slice, int]]:
        """The rank's part of indices `start` to `stop`: slices relative to `start`, each with the
        place of its first index in the shard."""
        own = 0
        for each in self.ranges:
            first, last = max(each.start, start), min(each.stop, stop)
            if first < last:
                yield slice(first - start, last - start), own + first - each.start
            own += each.stop - each.start


def part_of(dim: int, indices: slice) -> tuple[slice, ...]:
    """A `Load.part` with these indices of a dimension."""
    return (*[slice(None)] * dim, indices)


@dataclass
class Shards:
    """A rank's shard of a model. mesh: None until the model runs, so that trial and proofs do not
    communicate."""

    config: MeshConfig
    mesh: Mesh | None = None
    parameters: dict[str, ParameterShard] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)  # biases that another rank adds


@dataclass(frozen=True, slots=True)
class OnRank:
    """The calls before and after a module's own code."""

    shards: Shards
    is_summed: bool
    input_part: slice | None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.input_part is None else x[..., self.input_part]

    def give(self, out: torch.Tensor) -> torch.Tensor:
        mesh = self.shards.mesh
        if self.is_summed:
            return out if mesh is None else mesh.reduce(out.contiguous())
        if mesh is None:
            return torch.cat([out] * self.shards.config.tp, dim=-1)
        return mesh.gather(out.flatten(0, -2)).unflatten(0, out.shape[:-1])


class _OnRank(nn.Module):
    def forward(self, x: torch.Tensor, *args: Any, **named: Any) -> Any:
        around: OnRank = getattr(self, ON_RANK)
        own = vars(self).get(FUSED) or super().forward
        return around.give(own(around.take(x), *args, **named))


def shard_by_plan(model: Any, mesh: MeshConfig) -> Shards:
    """Divide a model whose parameters are on the meta device. Raises `Unservable`."""
    return Shards(mesh) if mesh.tp == 1 else _Plan(model, mesh).apply()


class _Plan:
    def __init__(self, model: Any, mesh: MeshConfig) -> None:
        self._model = model
        self._mesh = mesh
        self._styles: dict[str, str] = dict(model.tp_plan or {})
        self._shards = Shards(mesh)
        self._owners = Counter(
            id(parameter) for module in model.modules() for parameter in module._parameters.values()
        )
        text = model.config.get_text_config(decoder=True)
        self._num_heads: int | None = None
        with suppress(Exception):  # of the library's own kinds, where layers differ
            self._num_heads = text.num_attention_heads
        self._kv_heads = {  # before k_proj is divided
            child: module.k_proj.out_features // head_dim
            for module in model.modules()
            if isinstance(getattr(module, "k_proj", None), nn.Linear)
            and (head_dim := getattr(module, "head_dim", None))
            for child in (module.k_proj, getattr(module, "v_proj", None))
        }

    def apply(self) -> Shards:
        if not set(self._styles.values()) - WHOLE - GATHERED:
            raise self._refusal("has no tensor-parallel plan in transformers")
        for name, module in list(self._model.named_modules()):
            style = self._style(name)
            if style in DIVIDED:
                self._linear(name, module, style)
                continue
            for parameter in [*module._parameters]:
                its = self._style(f"{name}.{parameter}")
                if its in DIVIDED:
                    self._parameter(name, module, parameter, its)
            if style == EXPERTS:
                self._check_experts(name, module)
                self._surround(module, is_summed=True)
        return self._shards

    def _style(self, name: str) -> str | None:
        style = self._styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or style in WHOLE:
            return None
        if style not in DIVIDED | {EXPERTS}:
            raise self._refusal(f"has a plan of {style!r} for {name}")
        return style

    def _refusal(self, what: str) -> Unservable:
        return Unservable(f"{what} (tensor_parallel_size {self._mesh.tp})")

    # --- modules -----------------------------------------------------------------------------

    def _linear(self, name: str, module: Any, style: str) -> None:
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            raise self._refusal(f"has a plan of {style!r} for a {type(module).__name__}, {name}")
        is_row = style.startswith(("rowwise", "packed_rowwise"))
        size = module.in_features if is_row else module.out_features
        is_optional = style in GATHERED | SPLIT_INPUT
        is_tied = self._owners[id(module.weight)] > 1
        if is_optional and (size % self._mesh.tp or is_tied):
            return  # each rank has all of it
        if is_tied:
            raise self._refusal(f"divides {name}, which is tied to another")
        ranges = self._ranges(name, module, style, size)
        own = sum(each.stop - each.start for each in ranges)
        self._divide(name, module, "weight", 1 if is_row else 0, ranges)
        if is_row:
            module.in_features = own
            if module.bias is not None and self._mesh.place > 0:
                module._parameters["bias"] = None
                self._shards.elsewhere.add(f"{name}.bias")
        else:
            module.out_features = own
            if module.bias is not None:
                self._divide(name, module, "bias", 0, ranges)
        if style in GATHERED | SUMMED:
            part = ranges[0] if style in SPLIT_INPUT else None
            self._surround(module, style in SUMMED, part)

    def _ranges(self, name: str, module: Any, style: str, size: int) -> tuple[slice, ...]:
        """This rank's ranges of `size` indices."""
        if style == "colwise" and "attn" in name.split(".")[-2]:
            if (num_kv_heads := self._kv_heads.get(module)) is not None:
                heads, dim = self._mesh.kv_share(num_kv_heads), size // num_kv_heads
                return (slice(heads.start * dim, heads.stop * dim),)
            if self._num_heads is None:
                raise self._refusal("has no num_attention_heads of all layers")
            self._mesh.share(self._num_heads, "num_attention_heads")
        if not style.startswith("packed"):
            return (self._mesh.share(size, f"the size of {name}"),)
        half = self._mesh.share(size // 2, f"half the size of {name}")
        return half, slice(half.start + size // 2, half.stop + size // 2)

    def _parameter(self, name: str, module: nn.Module, parameter: str, style: str) -> None:
        """Divide a parameter that is not of a linear layer: of experts, or sinks."""
        tensor = module._parameters[parameter]
        if tensor is None:
            return
        if style in GATHERED | SPLIT_INPUT or (tensor.dim() == 1 and style != "colwise"):
            raise self._refusal(f"has a plan of {style!r} for {name}.{parameter}")
        is_row = style in ("rowwise", "packed_rowwise")
        dim = tensor.dim() - 1 if is_row else max(0, tensor.dim() - 2)
        full_name = f"{name}.{parameter}"
        self._divide(
            name, module, parameter, dim, self._ranges(full_name, None, style, tensor.shape[dim])
        )

    def _divide(
        self, name: str, module: nn.Module, parameter: str, dim: int, ranges: tuple[slice, ...]
    ) -> None:
        whole = module._parameters[parameter]
        assert whole is not None
        shard = ParameterShard(tuple(whole.shape), dim, ranges)
        size = (*whole.shape[:dim], shard.size, *whole.shape[dim + 1 :])
        made = torch.empty(size, dtype=whole.dtype, device=whole.device)
        module._parameters[parameter] = nn.Parameter(made, requires_grad=False)
        self._shards.parameters[f"{name}.{parameter}"] = shard

    def _check_experts(self, name: str, module: nn.Module) -> None:
        """All parameters must be divided, as outputs are summed, and rows must fit grouped
        GEMMs."""
        for own, parameter in module.named_parameters():
            if f"{name}.{own}" not in self._shards.parameters:
                raise self._refusal(f"has {name}.{own}, which its plan leaves whole,")
            if parameter.shape[-1] * parameter.dtype.itemsize % ROW_BYTES:
                raise self._refusal(f"divides rows of {name}.{own} to other than {ROW_BYTES} bytes")

    def _surround(
        self, module: nn.Module, is_summed: bool, input_part: slice | None = None
    ) -> None:
        setattr(module, ON_RANK, OnRank(self._shards, is_summed, input_part))
        module.__class__ = type(type(module).__name__, (_OnRank, type(module)), {})
