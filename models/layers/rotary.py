"""Rotary position embedding: the angles. Applying them is the attention backend's.

Frequencies of the scaled variants come from transformers' `ROPE_INIT_FUNCTIONS`, so they are those
of the reference by construction. All but `dynamic` are one table of max_model_len positions, built
once. With `dynamic` (NTK) the frequencies depend on a length, and the table is built for each step.

That length is stated per token, so that a token's rotation is a function of its own sequence alone:

    rope_len = max(window, prompt length, position + 1)

This is what transformers' cached `generate` does for one sequence: a prompt longer than the window
takes the frequencies of its full length, each later token those of the length it makes. It differs
where transformers' answer depends on what else ran: there a batch takes the length of its longest
row, and frequencies grown by a longer sequence stay until one below the window comes.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from asyncllm.attention.base import Rotation
from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ModelConfig
from asyncllm.models.layers.build import Build

SCALED_ROPE_TYPES = ("linear", "llama3", "yarn")
ROPE_TYPES = ("default", *SCALED_ROPE_TYPES, "dynamic")


class Rotary(Protocol):
    @property
    def uses_prompt_lens(self) -> bool: ...

    def rotation(self, positions: torch.Tensor, prompt_lens: torch.Tensor | None) -> Rotation:
        """The angles of one step's tokens.

        positions: int32 or int64 [T]; prompt_lens: the same, its sequence's prompt length of each
        token, or None where `uses_prompt_lens` is False.
        """
        ...


class StaticRotary:
    """A table of all positions; a token's row is its position."""

    uses_prompt_lens = False

    def __init__(self, inv_freq: torch.Tensor, scaling: float, build: Build) -> None:
        """inv_freq: float32 [rotary_dim / 2]; scaling multiplies cosines and sines (yarn)."""
        # Arithmetic on the meta device imports torch's compiler: seconds, and a thousand modules.
        device = torch.device("cpu") if build.device.type == "meta" else build.device
        positions = torch.arange(build.max_model_len, device=device)
        angles = positions[:, None].float() * inv_freq.to(device)
        self._table = _cos_sin(angles).mul_(scaling).to(build.device)

    def rotation(self, positions: torch.Tensor, prompt_lens: torch.Tensor | None) -> Rotation:
        return Rotation(positions, self._table)


class DynamicRotary:
    """One row per token of the step, its base grown by its sequence's length past the window."""

    uses_prompt_lens = True

    def __init__(
        self, base: float, rotary_dim: int, factor: float, window: int, build: Build
    ) -> None:
        self._base = base
        self._factor = factor
        self._window = window
        self._growth_power = rotary_dim / (rotary_dim - 2)
        self._exponents = _exponents(rotary_dim).to(build.device)

    def rotation(self, positions: torch.Tensor, prompt_lens: torch.Tensor | None) -> Rotation:
        assert prompt_lens is not None, "dynamic RoPE needs the prompt length of every token"
        rope_lens = torch.maximum(prompt_lens, positions + 1)  # [T]
        growth = self._factor * rope_lens.float() / self._window - (self._factor - 1)
        growth = torch.where(rope_lens > self._window, growth, 1.0) ** self._growth_power
        inv_freq = 1.0 / ((self._base * growth)[:, None] ** self._exponents)  # [T, rotary_dim / 2]
        rows = torch.arange(len(positions), device=positions.device, dtype=positions.dtype)
        return Rotation(rows, _cos_sin(positions[:, None].float() * inv_freq))


def build_rotary(config: ModelConfig, build: Build) -> Rotary:
    """The variant that `rope_parameters` asks for. Raises `ModelLoadError` naming what is not."""
    parameters: dict[str, Any] = config.hf_config.rope_parameters or {}
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise _error(config, f"rope_type {rope_type!r} is none of {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise _error(config, "partial_rotary_factor other than 1 is not supported")
    try:
        if rope_type == "dynamic":
            return DynamicRotary(
                base=parameters["rope_theta"],
                rotary_dim=config.head_dim,
                factor=parameters["factor"],
                window=config.max_position_embeddings,
                build=build,
            )
        if rope_type in SCALED_ROPE_TYPES:
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config.hf_config)
            return StaticRotary(inv_freq, scaling, build)
        inv_freq = 1.0 / parameters["rope_theta"] ** _exponents(config.head_dim)
        return StaticRotary(inv_freq, 1.0, build)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise _error(config, f"{rope_type}: {type(error).__name__}: {error}") from error


def _exponents(rotary_dim: int) -> torch.Tensor:
    """Frequency i is base ** -exponents[i]: float32 [rotary_dim / 2]."""
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _cos_sin(angles: torch.Tensor) -> torch.Tensor:
    """[rows, rotary_dim / 2] -> [rows, rotary_dim], cosines then sines."""
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _error(config: ModelConfig, message: str) -> ModelLoadError:
    return ModelLoadError(f"{config.path / 'config.json'}: rope_parameters: {message}")
