"""The decoder that all native families share: layers of attention and feed-forward.

A family states its differences in a `DecoderSpec`; nothing here depends on the family.

The residual is one tensor that each sublayer adds to in place. A sublayer returns the next norm of
the sum, because on a GPU one kernel computes both. So a layer's input norm runs at the end of the
layer before it, and the final norm at the end of the last layer:

    residual = embed    x = norm0(residual)
    layer i:            x = attention.add(x, end = (residual, norm before feed_forward))
                        x = feed_forward.add(x, end = (residual, norm before layer i + 1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from asyncllm.attention.base import AttentionLayer, Mixer, Rotation
from asyncllm.kernels.recurrent.records import StateLayer
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import Load, TokenInputs
from asyncllm.models.layers.attention import Attention, AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.embedding import Embedding, LMHead
from asyncllm.models.layers.experts import Experts
from asyncllm.models.layers.latent_attention import LatentAttention, LatentSpec
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.mlp import MLP, MLPSpec
from asyncllm.models.layers.norm import RMSNorm
from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed
from asyncllm.models.layers.rotary import Rotary, build_rotary
from asyncllm.models.supported import activation_of, check_decoder, unused_names

FeedForward = MLP | Experts


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms in the checkpoint; None: there is no such norm.

    Norms before a sublayer take the residual, norms after it the sublayer's output.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


PLAIN_ATTENTION, PLAIN_MLP, PRE_NORMS = AttentionSpec(), MLPSpec(), NormNames()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The differences between families.

    windows: each layer's sliding window, None: full attention; empty: of all. rotaries: one per
    layer; empty: one for all, by the configuration and the order of heads. feed_forward: (layer,
    name) -> a replacement of the `MLP`. norm_offset, norm_centered: as for `RMSNorm`. is_parallel:
    both sublayers take the layer's first norm. residual_scale: multiplies the output of each
    sublayer.
    """

    windows: tuple[int | None, ...] = ()
    rotaries: tuple[Rotary, ...] = ()
    attention: AttentionSpec | LatentSpec = PLAIN_ATTENTION
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # of attention scores
    mlp: MLPSpec = PLAIN_MLP
    feed_forward: Callable[[int, str], FeedForward] | None = None
    norms: NormNames = PRE_NORMS
    norm_offset: float | None = None
    norm_centered: bool = False
    is_parallel: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it differs from Llama only in windows, biases and q and k norms, as
        `persistent_decode` requires."""
        if not isinstance(self.attention, AttentionSpec):
            return False
        if self.attention.qk_norm not in (None, "head"):
            return False
        attention = replace(self.attention, qkv_bias=False, output_bias=False, qk_norm=None)
        mlp = replace(self.mlp, bias=False)
        rest = replace(self, windows=(), attention=attention, mlp=mlp)
        return rest == DecoderSpec()

    def norm(self, name: str, config: ModelConfig, build: Build) -> RMSNorm:
        """Make a norm of the residual, or of a sublayer's output."""
        eps, centered = self.norm_eps(config), self.norm_centered
        return RMSNorm(name, config.hf_config.hidden_size, eps, build, self.norm_offset, centered)

    def norm_eps(self, config: ModelConfig) -> float:
        hf = config.hf_config
        eps: float = hf.layer_norm_eps if self.norm_centered else hf.rms_norm_eps
        return eps


class DecoderLayer:
    """index: of the layer in the model. place: its index in this rank's pipeline stage."""

    def __init__(
        self, index: int, place: int, config: ModelConfig, spec: DecoderSpec, build: Build
    ) -> None:
        hf = config.hf_config
        name = f"model.layers.{index}"
        layer = replace(attention_layer(index, config, spec, build), index=place)
        where = f"{name}.self_attn", layer, hf.hidden_size
        self.attention: Attention | LatentAttention
        if isinstance(spec.attention, LatentSpec):
            self.attention = LatentAttention(*where, spec.attention, build)
        else:
            self.attention = Attention(*where, spec.norm_eps(config), spec.attention, build)

        def norm(part: str | None) -> RMSNorm | None:
            return None if part is None else spec.norm(f"{name}.{part}", config, build)

        names = spec.norms
        self.before_attention = norm(names.before_attention)
        self.after_attention = norm(names.after_attention)
        self.before_feed_forward = norm(names.before_feed_forward)
        self.after_feed_forward = norm(names.after_feed_forward)
        if spec.feed_forward is not None:
            self.feed_forward = spec.feed_forward(index, f"{name}.mlp")
        else:
            size = hf.intermediate_size
            self.feed_forward = MLP(f"{name}.mlp", hf.hidden_size, size, spec.mlp, build)
        self._scale, self._is_parallel = spec.residual_scale, spec.is_parallel
        first = None if spec.is_parallel else self.before_attention  # it feeds one GEMM
        if first is not None and isinstance(self.attention, Attention):
            first.feed(self.attention.qkv_proj.in_bytes)
        if self.before_feed_forward is not None and isinstance(self.feed_forward, MLP):
            self.before_feed_forward.feed(self.feed_forward.gate_up_proj.in_bytes)

    def __call__(
        self,
        x: Normed,
        residual: torch.Tensor,
        next_norm: RMSNorm | None,
        rotation: Rotation,
        mixer: Mixer,
    ) -> Normed:
        """Add both sublayers to the residual [T, hidden_size] in place. x: its first norm. Returns
        the next layer's first norm."""
        middle, after = _constants(self.before_feed_forward), _constants(self.after_attention)
        end = AddRMSNorm(residual, middle, after, self._scale)
        attended = self.attention.add(x, rotation, mixer, end)
        after = _constants(self.after_feed_forward)
        end = AddRMSNorm(residual, _constants(next_norm), after, self._scale)
        return self.feed_forward.add(x if self._is_parallel else attended, end)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers, in the order of use."""
        return *self.attention.linears, *self.feed_forward.linears

    def loads(self) -> Iterator[Load]:
        norms = (
            self.before_attention,
            self.after_attention,
            self.before_feed_forward,
            self.after_feed_forward,
        )
        yield from self.attention.loads()
        yield from self.feed_forward.loads()
        for norm in filter(None, norms):
            yield from norm.loads()

    def finish_loading(self) -> None:
        for linear in self.attention.linears:
            linear.finish_loading()
        self.feed_forward.finish_loading()


class DenseDecoder:
    """A `CausalLM`, which documents shapes."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, build: Build) -> None:
        check_decoder(config)
        hf = config.hf_config
        spec = replace(spec, mlp=replace(spec.mlp, activation=activation_of(config)))
        self.is_plain = spec.is_plain
        ends = build  # for embedding, last norm and LM head, which only the first stage has
        if build.mesh.config.stage > 0:
            ends = replace(build, device=torch.device("meta"), lora=None)
        self.embed_tokens = Embedding(
            "model.embed_tokens", hf.vocab_size, hf.hidden_size, ends, spec.embedding_scale
        )
        self._build, self._mesh, self._hidden_size = build, build.mesh, hf.hidden_size
        own = build.mesh.config.layers(config.num_layers)
        self.layers = [
            DecoderLayer(index, place, config, spec, build) for place, index in enumerate(own)
        ]
        self.norm = spec.norm("model.norm", config, ends)
        self.lm_head = LMHead(
            "lm_head",
            self.embed_tokens,
            hf.tie_word_embeddings,
            ends,
            spec.logit_scale,
            spec.logit_soft_cap,
        )
        order = spec.attention.order
        rotaries = spec.rotaries or (build_rotary(config, build, order),) * config.num_layers
        self.rotaries = list(dict.fromkeys(rotaries))  # each once
        self._rotary_of = [self.rotaries.index(rotaries[index]) for index in own]
        # The norm after a stage's last layer runs on the next stage, or at the end on the first.
        last = self.norm if build.mesh.config.pp == 1 else None
        self._input_norms = [*(layer.before_attention for layer in self.layers), last]
        self.attention_layers = [layer.attention.layer for layer in self.layers]
        self.state_layers: tuple[StateLayer, ...] = ()
        self.full_read_tokens = max(layer.feed_forward.full_read_tokens for layer in self.layers)
        self.uses_prompt_lens = any(rotary.uses_prompt_lens for rotary in self.rotaries)
        self.aliases = {**self.lm_head.aliases, **unused_names(config, build.mesh.config)}

    def forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        # Before the embedding: kernels of layers start early, and read rotations before they wait.
        rotations = [one.rotation(inputs.positions, inputs.prompt_lens) for one in self.rotaries]
        residual = self._begin(inputs.ids)
        first = self._input_norms[0]
        x = Normed(residual if first is None else first(residual))
        for layer, rotary, next_norm in zip(
            self.layers, self._rotary_of, self._input_norms[1:], strict=True
        ):
            x = layer(x, residual, next_norm, rotations[rotary], mixer)
        if self._mesh.config.pp > 1:
            return residual
        return x.values if x.squares is None else self.norm(residual)

    def make_room(self, num_tokens: int) -> None:
        """Allocate the buffer for the residual of another stage, of up to `num_tokens`."""
        self.received = self._build.empty(num_tokens, self._hidden_size).zero_()

    def _begin(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual before this stage's layers, [T, hidden_size]."""
        if self._mesh.config.stage == 0:
            return self.embed_tokens(token_ids)
        return self.received[: len(token_ids)].clone()  # layers add to it in place

    def last_norm(self, num_tokens: int) -> torch.Tensor:
        """On the first stage, hidden states [num_tokens, hidden_size] of the last stage's
        residual."""
        return self.norm(self.received[:num_tokens])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._mesh.config.stage > 0:  # only the first stage's logits are used
            return hidden.new_zeros(()).expand(len(hidden), self.embed_tokens.vocab_size)
        return self.lm_head(hidden)

    def loads(self) -> Iterator[Load]:
        is_first = self._mesh.config.stage == 0
        if is_first:
            yield from self.embed_tokens.loads()
        for layer in self.layers:
            yield from layer.loads()
        if is_first:
            yield from self.norm.loads()
            yield from self.lm_head.loads()

    def finish_loading(self) -> None:
        for layer in self.layers:
            layer.finish_loading()


def attention_layer(
    index: int, config: ModelConfig, spec: DecoderSpec, build: Build
) -> AttentionLayer:
    window = spec.windows[index] if spec.windows else None
    scale = spec.attention_scale
    return AttentionLayer(
        index=index,
        num_heads=config.hf_config.num_attention_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if scale is None else scale,
        # A window as large as the context has no effect; kernels are faster without it.
        window=window if window is not None and window < build.max_model_len else None,
        soft_cap=spec.soft_cap,
    )


def _constants(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else norm.constants
