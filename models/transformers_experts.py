"""Experts of transformers models, by `Ops.experts` or by grouped GEMMs.

Neither waits for the device. Most classes use transformers' experts function, and get one of ours.
Others loop over the experts that a step touches, for which the host waits: this works neither on
the meta device nor in a graph.
Such modules get a `forward` of ours here; each class was compared with its own `generate`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

from asyncllm.kernels.records import Activation
from asyncllm.models.layers.ops import SILU, ExpertWeights, Normed, Ops, Routed
from asyncllm.models.layers.torch_ops import by_expert

EXPERTS = "asyncllm"
OPS = "asyncllm_ops"  # the attribute of modules that use transformers' experts function
ACTIVATIONS = {"SiLUActivation": SILU, "GELUTanh": Activation("gelu_tanh")}
LANGUAGE = "asyncllm_language"  # the attribute of X-MOD's adapters


def _experts(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """transformers' experts function. On the meta device only the shape matters."""
    if hidden.device.type == "meta":
        return torch.empty_like(hidden)
    activation = _activation(module)
    if activation is None:
        out: torch.Tensor = moe.grouped_mm_experts_forward(module, hidden, expert_ids, gates)
        return out
    dtype = module.down_proj.dtype
    gate_up_bias = module.gate_up_proj_bias if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias else None
    weights = ExpertWeights(
        module.gate_up_proj, module.down_proj, gate_up_bias, down_bias, activation
    )
    routed = Routed(expert_ids.contiguous(), gates.float().contiguous())
    ops: Ops = getattr(module, OPS)
    made = ops.experts(Normed(hidden.to(dtype).contiguous()), weights, routed)
    return made.to(hidden.dtype)


def _activation(module: Any) -> Activation | None:
    """Return the activation of experts that are what `Ops.experts` computes; None of others."""
    is_gated = module.has_gate and module.is_concatenated and not module.is_transposed
    if not is_gated or getattr(module, "has_post_expert_norm", False):
        return None
    if getattr(module, "_is_expert_parallel", False):  # some ids are none of an expert
        return None
    if type(module)._apply_gate is not moe._default_apply_gate:
        return None
    return ACTIVATIONS.get(type(module.act_fn).__name__)


moe.ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def replace_experts(model: Any, ops: Ops) -> None:
    """To be called before the trial."""
    with suppress(AttributeError, ValueError):  # the class does not use the function
        model.set_experts_implementation(EXPERTS)
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            setattr(module, OPS, ops)
        if (ours := REPLACED.get(type(module).__name__)) is not None:
            module.__class__ = type(type(module).__name__, (ours, type(module)), {})
        if isinstance(module, _OneLanguage):
            setattr(module, LANGUAGE, model.config.default_language)


class _Mixin(nn.Module):
    """Mixed into a module's class, whose attributes it uses."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class _IdentityExperts(_Mixin):
    """LongCat: the last experts return their input."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if hidden_states.device.type == "meta":
            return torch.empty_like(hidden_states)
        num_routed = self.num_routed_experts
        is_identity = top_k_index >= num_routed
        routed = Routed(
            top_k_index.masked_fill(is_identity, 0), top_k_weights.masked_fill(is_identity, 0.0)
        )

        def compute(rows: torch.Tensor, ends: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            weight = self.gate_up_proj[:num_routed].transpose(1, 2)
            gate, up = F.grouped_mm(rows, weight, offs=ends).chunk(2, dim=-1)
            return F.grouped_mm(self.act_fn(gate) * up, self.down_proj.transpose(1, 2), offs=ends)

        share = (top_k_weights * is_identity).sum(-1, keepdim=True)
        out = by_expert(hidden_states, routed, num_routed, compute)
        return out + (hidden_states * share).to(out.dtype)


class _StackedExperts(_Mixin):
    """DBRX: weights [experts * size, hidden_size]."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if hidden_states.device.type == "meta":
            return torch.empty_like(hidden_states)
        mlp, size = self.mlp, (self.num_experts, -1, self.hidden_size)
        gate, up, down = (w.view(size) for w in (mlp.w1, mlp.v1, mlp.w2))

        def compute(rows: torch.Tensor, ends: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            gates, ups = (F.grouped_mm(rows, w.transpose(1, 2), offs=ends) for w in (gate, up))
            return F.grouped_mm(mlp.activation_fn(gates) * ups, down, offs=ends)

        rows = hidden_states.reshape(-1, self.hidden_size)
        routed = Routed(top_k_index, top_k_weights)
        return by_expert(rows, routed, self.num_experts, compute).view_as(hidden_states)


class _KeptOnDevice(TorchFunctionMode):
    """`tolist` returns the tensor."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        return args[0] if function is torch.Tensor.tolist else function(*args, **(named or {}))


class _DeviceSizes(_Mixin):
    """JetMoE's gate: the number of rows of each expert stays a tensor."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        with _KeptOnDevice():
            return super().forward(hidden_states)


class _SortedExperts(_Mixin):
    """JetMoE: rows are sorted by expert."""

    def forward(self, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
        if inputs.device.type == "meta":
            return inputs.new_empty(len(inputs), self.output_size)
        ends = expert_size.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(inputs, self.weight.transpose(1, 2), offs=ends)


class _SortedTransposed(_Mixin):
    """Aria: the same with weights [experts, in, out]."""

    def forward(self, input: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        if input.device.type == "meta":
            return input.new_empty(len(input), self.out_features)
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(input, self.weight, offs=ends)


class _OneLanguage(_Mixin):
    """X-MOD: all tokens use the adapter of the default language."""

    def lang_adapter(self, lang_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = hidden_states
        if self.adapter_layer_norm is not None:
            hidden_states = self.adapter_layer_norm(hidden_states)
        elif self.adapter_reuse_layer_norm:
            hidden_states = self.LayerNorm(hidden_states)
        if self.ln_before_adapter:
            residual = hidden_states
        adapted: torch.Tensor = self.adapter_modules[getattr(self, LANGUAGE)](hidden_states)
        return adapted + residual


REPLACED: dict[str, type[nn.Module]] = {
    "AriaGroupedExpertsGemm": _SortedTransposed,  # in older versions
    "DbrxExperts": _StackedExperts,
    "JetMoeParallelExperts": _SortedExperts,
    "JetMoeTopKGating": _DeviceSizes,
    "LongcatFlashExperts": _IdentityExperts,
    "XmodOutput": _OneLanguage,
}
