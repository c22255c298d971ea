"""Runs transformers' model code with our paged attention: any of its causal LMs as a `CausalLM`.

transformers computes all but attention. A step is one packed row, without cache and masks. The LM
head only runs on sampled rows, by the class's own `forward` with given hidden states, so that soft
caps and scales of the class apply. Code in a model folder is never run.

A model is built with its parameters on the meta device (transformers_build.py). After a trial run
there (transformers_trial.py) the parameters are allocated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from asyncllm.attention.base import AttentionLayer, Mixer, Rotation
from asyncllm.errors import ModelLoadError, one_line
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import Load, TokenInputs
from asyncllm.models.layers.build import Build
from asyncllm.models.transformers_attention import (
    LAYER,
    RUN,
    HeadShape,
    Rotations,
    Step,
    Unservable,
)
from asyncllm.models.transformers_build import META, allocate, without_weights
from asyncllm.models.transformers_fusion import Fusion
from asyncllm.models.transformers_legacy import LEGACY
from asyncllm.models.transformers_lora import adapt, noting_modules
from asyncllm.models.transformers_modules import no_rotation
from asyncllm.models.transformers_rope import (
    HANDLER,
    STATIC_ROPE_TYPES,
    StepRotary,
    replace_angles,
    rotary_modules,
)
from asyncllm.models.transformers_shards import shard_by_plan
from asyncllm.models.transformers_states import StateStep
from asyncllm.models.transformers_trial import (
    TRIAL_TOKENS,
    Tried,
    position_modules,
    try_on_meta,
)
from asyncllm.models.transformers_weights import WeightNames

logger = logging.getLogger("asyncllm")


class TransformersModel:
    """A `CausalLM`, which documents shapes."""

    full_read_tokens = 1  # the number of experts has a different name in each class

    def __init__(self, config: ModelConfig, build: Build) -> None:
        """Raises `ModelLoadError` if the class would not compute the same as with its own code."""
        try:
            self._model = model = without_weights(config, build)
            shards = shard_by_plan(model, build.mesh.config)
            rotaries = _step_rotaries(model, build.max_model_len)
            with noting_modules(model, TRIAL_TOKENS) as modules:
                tried = try_on_meta(model, build.max_model_len)
            self._base, self._output = tried.base, tried.output
            self._names = WeightNames(model, config.path, shards.parameters)
            self._names.leave_out(shards.elsewhere)
            self.left_out = tried.idle
            for name in tried.idle:
                tower = model.get_submodule(name)
                self._names.leave_out(f"{name}.{each}" for each in tower.state_dict())
                model.set_submodule(name, nn.Identity())
            if tried.idle and build.device != META:
                logger.info("serving text alone, without %s", ", ".join(tried.idle))
            shape = HeadShape.of(tried.calls, build)
            fusion = None
            # Nothing runs on the meta device, so nothing is fused. Adapters add to the outputs of
            # layers that fusion would merge.
            if build.device != META and build.lora is None:
                fusion = _fuse(model, tried, shape, rotaries, build)
            allocate(model, build.device)
            if build.lora is not None:
                adapt(modules, build.lora, shards)
            head_norm = fusion.head_norm if fusion is not None else lambda call: None
            self._step = step = Step(tried.calls, shape, head_norm)
            self._states = StateStep(tried.states)
        except Unservable as error:
            raise ModelLoadError(
                f"{config.path / 'config.json'}: architectures {config.architecture!r} {error}, "
                "which is not served"
            ) from error
        # The model has one current step, and prewarming runs it in other threads.
        self._running = threading.Lock()
        for module in model.modules():
            setattr(module, HANDLER, step)
        for call, layer in zip(tried.calls, step.layers, strict=True):
            vars(call.module).setdefault(LAYER, []).append(layer)
        self._takes_positions = tried.takes_positions
        if not tried.takes_positions:
            for module in position_modules(model):
                give_positions(module)
        if config.architecture not in LEGACY:
            model.set_attn_implementation(RUN)
        if fusion is not None:
            fusion.apply(step, build.ops)
        _let_give(self._base)
        shards.mesh = build.mesh
        self._fusion = fusion
        self.attention_layers: list[AttentionLayer] = step.layers
        self.state_layers = self._states.layers
        self.uses_prompt_lens = any(rotary.uses_prompt_lens for rotary in rotaries.values())
        self._rotaries = list(rotaries.values())
        for rotary in self._rotaries:
            rotary.to(build.device)
        self._no_rotation = no_rotation(torch.zeros(1, device=build.device), shape.head_dim)

    @property
    def aliases(self) -> Mapping[str, str | None]:
        return self._names.aliases

    def forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        with self._running:
            return self._forward(inputs, mixer)

    def _forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        step, positions = self._step, inputs.positions
        # Before the first layer: kernels start early, and read them before they wait.
        rotations: Rotations = {
            rotary: rotary.rotation(positions, inputs.prompt_lens) for rotary in self._rotaries
        }
        rotations[None] = Rotation(torch.zeros_like(positions), self._no_rotation.cos_sin)
        step.begin(mixer, positions, rotations)
        self._states.begin(mixer)
        named = {"position_ids": positions.long()[None]} if self._takes_positions else {}
        try:
            output = self._base(input_ids=inputs.ids.long()[None], use_cache=False, **named)
        finally:
            step.mixer = None
            self._states.begin(None)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with self._running:
            self._base.given = self._output(last_hidden_state=hidden[None])
            try:
                logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
            finally:
                self._base.given = None
        return logits.to(hidden.dtype)

    def loads(self) -> Iterator[Load]:
        return self._names.loads()

    def finish_loading(self) -> None:
        self._names.finish_loading()
        self._step.finish_loading()
        if self._fusion is not None:
            self._fusion.finish_loading()


Rotaries = dict[tuple[Any, str | None], StepRotary]  # by module and type of layers


def _step_rotaries(model: nn.Module, max_model_len: int) -> Rotaries:
    """The rotary modules whose angles we compute. Modules whose angles depend on a sequence's
    length are replaced, as a packed row has several sequences."""
    found: Rotaries = {}
    for module in rotary_modules(model):
        types = [*module.rope_type] if isinstance(module.rope_type, dict) else [None]
        for layer_type in types:
            kind = module.rope_type[layer_type] if layer_type else module.rope_type
            if kind == "axial":  # for images
                continue
            try:
                found[module, layer_type] = StepRotary(module, layer_type, max_model_len)
            except Exception as error:  # modules may raise anything
                if kind not in STATIC_ROPE_TYPES:
                    raise Unservable(f"has rope_type {kind!r} ({one_line(error)})") from error
        if any(found[key].by_length for key in found if key[0] is module):
            replace_angles(module, {t: found[module, t] for t in types})
    return found


class _GivenPositions(nn.Module):
    def forward(self, *args: Any, **named: Any) -> Any:
        step: Step = getattr(self, HANDLER)
        return super().forward(*args, **named | {"position_ids": step.positions})


def give_positions(module: nn.Module) -> None:
    """Have a module use the step's positions instead of those that its model counts."""
    module.__class__ = type(type(module).__name__, (_GivenPositions, type(module)), {})


def _fuse(model: Any, tried: Tried, shape: HeadShape, rotaries: Rotaries, build: Build) -> Fusion:
    """Find the modules that are proved equal to ours, and allocate merged weights."""
    fusion = Fusion(model, build.dtype, build.device)
    for call in tried.calls:
        arguments = tried.named.get(call.module, {})
        given = arguments.get("position_embeddings")
        by = [rotaries[key] for key, output in tried.angles if output is given and key in rotaries]
        is_only = sum(call.module is other.module for other in tried.calls) == 1
        if is_only and shape.is_of(call):
            fusion.add_attention(call, arguments, [*by[:1], None])
    fusion.allocate(build.device)
    if build.device.type == "cuda":
        torch.cuda.empty_cache()  # of the proofs
    return fusion


def _let_give(base: Any) -> None:
    """Have a base model return its attribute `given`, unless it is None, instead of computing."""
    model_class = type(base)

    def forward(self: Any, *args: Any, **arguments: Any) -> Any:
        if self.given is not None:
            return self.given
        return model_class.forward(self, *args, **arguments)

    base.given = None
    # A subclass, because a function set on the module would form a reference cycle with it. The
    # library's name tables need the original `__module__`.
    changes = {"forward": forward, "__module__": model_class.__module__}
    base.__class__ = type(model_class.__name__, (model_class,), changes)
