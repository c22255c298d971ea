"""Scales of an FP8 KV cache: from the checkpoint, or measured at the start.

Keys and values are stored divided by their layer's scales, so that the largest ones fit. The
default is 1, as the keys and values of most models fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from asyncllm.attention.base import AttentionLayer, Mixer, RotatedHeads, Rotation
from asyncllm.attention.heads import rotated_heads
from asyncllm.attention.kv_cache import KVScales
from asyncllm.attention.recurrence import run
from asyncllm.errors import ModelLoadError
from asyncllm.kernels.recurrent.records import DeltaRule, Recurrence, StateLayer
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import CausalLM, TokenInputs
from asyncllm.models.checkpoint import Checkpoint
from asyncllm.models.parallel.stages import Stages

# Names below the layer's, as in compressed-tensors and modelopt.
K_NAMES = "self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale"
V_NAMES = "self_attn.v_scale", "self_attn.attn.v_scale", "self_attn.v_proj.v_scale"
MEASURED_TOKENS = 256
HEADROOM = 2.0  # for values larger than those of the measured tokens


def stored_scales(config: ModelConfig, indices: Sequence[int]) -> KVScales:
    """The checkpoint's scales of these layers, 1 by default. Raises `ModelLoadError` for an invalid
    scale."""
    try:
        checkpoint = Checkpoint(config.path)
    except ModelLoadError:  # with dummy weights; else loading has raised it already
        return KVScales.ones(len(indices))
    layers = [f"model.layers.{index}" for index in indices]
    return KVScales(
        [_stored(checkpoint, layer, K_NAMES) for layer in layers],
        [_stored(checkpoint, layer, V_NAMES) for layer in layers],
    )


def _stored(checkpoint: Checkpoint, layer: str, names: tuple[str, ...]) -> float:
    for name in (f"{layer}.{name}" for name in names):
        if name in checkpoint.names:
            tensor = checkpoint.read(name)
            scale = tensor.float().item() if tensor.numel() == 1 else math.nan
            if not 0 < scale < math.inf:
                raise ModelLoadError(f"{checkpoint.file(name)}: {name} must be one positive number")
            return scale
    return 1.0


def measured_scales(
    model: CausalLM,
    config: ModelConfig,
    dtype: torch.dtype,
    max_len: int,
    device: torch.device,
    stages: Stages | None,
) -> KVScales:
    """Scales by the largest keys and values of a sequence of random tokens."""
    num_tokens = min(MEASURED_TOKENS, max_len)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (num_tokens,), generator=generator)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    lens = torch.full_like(positions, num_tokens) if model.uses_prompt_lens else None
    mixer = _Measure(len(model.attention_layers), torch.finfo(dtype).max / HEADROOM)
    if stages is not None:
        stages.receive(num_tokens)
    residual = model.forward(TokenInputs(ids.to(device), positions, lens), mixer)
    if stages is not None:
        stages.send(residual, returns=False)
    return mixer.scales()


class _Measure(Mixer):
    """Attends within one sequence, and records the largest key and value of each layer."""

    def __init__(self, num_layers: int, largest: float) -> None:
        self._most: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self._largest = largest

    def attend(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        q, k, v = rotated_heads(layer, qkv, rotation)
        self._most[layer.index] = [k.abs().max(), v.abs().max()]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)

    def recur(self, layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
        device = inputs.v.device if isinstance(inputs, DeltaRule) else inputs.x.device
        return run(inputs, torch.zeros(layer.shape, dtype=layer.dtype, device=device))[0]

    def scales(self) -> KVScales:
        return KVScales(*(list(self._of(which)) for which in (0, 1)))

    def _of(self, which: int) -> Iterator[float]:
        for most in self._most:
            yield max(float(most[which]) / self._largest, torch.finfo(torch.float32).tiny)
