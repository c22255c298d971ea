"""The dense pre-norm decoder that the Llama-like families share.

A family states its differences in a `DecoderSpec`; nothing here asks which family it is.

The residual stream is one tensor that each sublayer adds to in place. What it returns is the next
norm of the sum, because on a GPU both end one kernel. So a layer's input norm runs at the end of
the layer before it, and the final norm at the end of the last:

    residual = embed    x = norm0(residual)
    layer i:            x = attention.add(x, residual, post_norm)
                        x = mlp.add(x, residual, norm[i+1])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncllm.attention.base import AttentionLayer, Mixer
from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import Load, TokenInputs
from asyncllm.models.checkpoint import num_stored_layers
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.embedding import Embedding, LMHead
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed, SwiGLU
from asyncllm.models.layers.rotary import build_rotary

SWIGLU = SwiGLU()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The differences between families. `windows`: tokens each layer sees, None for all."""

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class RMSNorm:
    """A norm of the residual stream, with its name in a checkpoint.

    `constants` are for the matrix products that end or begin with it.
    """

    def __init__(self, name: str, size: int, eps: float, build: Build) -> None:
        self._name = f"{name}.weight"
        self._ops = build.ops
        self.constants = Norm(build.empty(size), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> the same shape, a new tensor."""
        return self._ops.rms_norm(x, self.constants)

    def loads(self) -> Iterator[Load]:
        yield Load(self._name, self.constants.weight)


class MLP:
    """The SwiGLU feed-forward: down(silu(gate(x)) * up(x)), gate and up in one matrix product."""

    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, bias: bool, build: Build
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(name, parts, hidden_size, bias, build)
        self.down_proj = Linear(name, {"down_proj": hidden_size}, intermediate_size, bias, build)

    def add(self, x: Normed, residual: torch.Tensor, next_norm: Norm) -> Normed:
        """In place: residual [T, hidden_size] += the feed-forward of x. Returns the next norm's."""
        gated = Normed(self.gate_up_proj.with_epilogue(x, SWIGLU))
        return self.down_proj.with_epilogue(gated, AddRMSNorm(residual, next_norm))

    def loads(self) -> Iterator[Load]:
        yield from self.gate_up_proj.loads()
        yield from self.down_proj.loads()


class DecoderLayer:
    def __init__(self, index: int, config: ModelConfig, spec: DecoderSpec, build: Build) -> None:
        hf = config.hf_config
        name = f"model.layers.{index}"
        window = spec.windows[index]
        layer = AttentionLayer(
            index=index,
            num_heads=hf.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            # A window that holds the whole context hides nothing; kernels are faster without.
            window=window if window is not None and window < build.max_model_len else None,
        )
        self.input_norm = RMSNorm(f"{name}.input_layernorm", hf.hidden_size, hf.rms_norm_eps, build)
        self.attention = Attention(
            f"{name}.self_attn",
            layer,
            hf.hidden_size,
            qkv_bias=spec.qkv_bias,
            output_bias=spec.output_bias,
            qk_norm_eps=hf.rms_norm_eps if spec.qk_norm else None,
            build=build,
        )
        self.post_attention_norm = RMSNorm(
            f"{name}.post_attention_layernorm", hf.hidden_size, hf.rms_norm_eps, build
        )
        self.mlp = MLP(f"{name}.mlp", hf.hidden_size, hf.intermediate_size, spec.mlp_bias, build)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order of their use."""
        attention, mlp = self.attention, self.mlp
        return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj

    def loads(self) -> Iterator[Load]:
        for child in (self.input_norm, self.attention, self.post_attention_norm, self.mlp):
            yield from child.loads()


class DenseDecoder:
    """A `CausalLM`; see there for shapes."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, build: Build) -> None:
        _check_supported(config)
        hf = config.hf_config
        self.embed_tokens = Embedding("model.embed_tokens", hf.vocab_size, hf.hidden_size, build)
        self.layers = [
            DecoderLayer(index, config, spec, build) for index in range(config.num_layers)
        ]
        self.norm = RMSNorm("model.norm", hf.hidden_size, hf.rms_norm_eps, build)
        self.lm_head = LMHead("lm_head", self.embed_tokens, hf.tie_word_embeddings, build)
        self.rotary = build_rotary(config, build)
        self._input_norms = [*(layer.input_norm for layer in self.layers), self.norm]
        self.attention_layers = [layer.attention.layer for layer in self.layers]
        self.uses_prompt_lens = self.rotary.uses_prompt_lens
        self.aliases = self.lm_head.aliases

    def forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        # Before the embedding, the last ordinary launch: layers' kernels read it before their wait.
        rotation = self.rotary.rotation(inputs.positions, inputs.prompt_lens)
        residual = self.embed_tokens(inputs.ids)  # [T, hidden_size]
        x = Normed(self._input_norms[0](residual))
        for layer, next_norm in zip(self.layers, self._input_norms[1:], strict=True):
            post_norm = layer.post_attention_norm.constants
            x = layer.attention.add(x, residual, post_norm, rotation, mixer)
            x = layer.mlp.add(x, residual, next_norm.constants)
        return x.values if x.squares is None else self.norm(residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def loads(self) -> Iterator[Load]:
        yield from self.embed_tokens.loads()
        for layer in self.layers:
            yield from layer.loads()
        yield from self.norm.loads()
        yield from self.lm_head.loads()

    def finish_loading(self) -> None:
        for layer in self.layers:
            for linear in layer.linears:
                linear.finish_loading()


def unsupported(config: ModelConfig, key: str, reason: str) -> ModelLoadError:
    """The error for one key of config.json; `reason` continues after its value."""
    value = getattr(config.hf_config, key, None)
    return ModelLoadError(f"{config.path / 'config.json'}: {key} {value!r} {reason}")


def _check_supported(config: ModelConfig) -> None:
    """All that the families of the dense decoder take for granted. Raises `ModelLoadError`."""
    hf = config.hf_config
    if hf.hidden_act != "silu":
        raise unsupported(config, "hidden_act", "is not supported, only 'silu'")
    if hf.num_attention_heads % config.num_kv_heads:
        raise unsupported(
            config,
            "num_attention_heads",
            f"is no multiple of {config.num_kv_heads} key-value heads",
        )
    num_stored = num_stored_layers(config.path)  # before layers are built until memory ends
    if num_stored and config.num_layers > num_stored:
        raise unsupported(
            config, "num_hidden_layers", f"is more than the {num_stored} of the checkpoint"
        )
