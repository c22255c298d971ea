"""The settings that all layers of a model share: device, dtype, kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncllm.models.layers.experts_method import (
    ExpertsMethod,
    ExpertsShape,
    UnquantizedExpertsMethod,
)
from asyncllm.models.layers.linear_method import LinearMethod
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.layers.ops import Ops
from asyncllm.models.parallel.mesh import ALONE, Mesh

KERNEL_HEAD_DIMS = (64, 128, 256)  # for 16-bit dtypes; torch's attention takes any


@dataclass(frozen=True, slots=True)
class Build:
    """method_for: a linear layer's name in the checkpoint -> its method.
    quantized_experts: name and shape of experts -> their method, or None if they are in `dtype`.
    max_model_len: the number of positions, in tokens.
    keeps_latents: MLA layers keep latents in their pages (`AttentionLayer.latent_dim`).
    """

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    method_for: Callable[[str], LinearMethod]
    max_model_len: int
    lora: LoRALayers | None = None  # the adapter slots, if LoRA is enabled
    keeps_latents: bool = False
    mesh: Mesh = ALONE
    quantized_experts: Callable[[str, ExpertsShape], ExpertsMethod | None] | None = None

    def experts_method(self, name: str, shape: ExpertsShape) -> ExpertsMethod:
        """The method of the experts below `name` in the checkpoint. Raises `ModelLoadError`."""
        if self.quantized_experts is not None:
            method = self.quantized_experts(name, shape)
            if method is not None:
                return method
        return UnquantizedExpertsMethod(self.dtype, self.device, self.ops, self.mesh.config)

    def page_dim(self, head_dim: int) -> int:
        """The size of heads in pages: padded to one that kernels support."""
        dims = KERNEL_HEAD_DIMS if self.dtype.itemsize == 2 else ()
        return next((dim for dim in dims if dim >= head_dim), head_dim)

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
