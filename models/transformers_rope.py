"""The angles of transformers' rotary modules, as tables with a row per position or token.

A static module is called once, for all positions. With longrope and dynamic NTK the angles depend
on a sequence's length, and a packed row has several sequences. So their modules return angles that
are computed here, for each token by its own sequence (models/layers/rotary.py defines the length).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from asyncllm.attention.base import Rotation

HANDLER = "asyncllm_attention"  # the attribute of modules with the current `Step`, or a trial
ANGLES = "asyncllm_angles"  # the attribute of replaced rotary modules: layer type -> `StepRotary`
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
# The layout of a module's cosines and sines [T, dim / 2] over the entries of a head.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half": lambda x: torch.cat((x, x), dim=-1),
    "interleaved": lambda x: x.repeat_interleave(2, dim=-1),
    "single": lambda x: x,
}


class StepRotary:
    """The angles of a rotary module, for one layer type."""

    def __init__(self, module: Any, layer_type: str | None, max_model_len: int) -> None:
        """The module's buffers must be on the CPU. Raises `ValueError` for an unknown kind."""
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        self._module, self._layer_type = module, layer_type
        self.by_length = kind not in STATIC_ROPE_TYPES  # angles depend on a sequence's length
        self._frequencies: torch.Tensor | None = None  # dynamic: by length
        self._scaling = 1.0
        self._window: int | None = None  # longrope: longer sequences use the table's second part
        self.layout, self._table = self._ask(max_model_len)
        if kind == "dynamic":
            lengths = torch.arange(max_model_len + 1).unsqueeze(1)
            self._frequencies, self._scaling = self._compute(kind, lengths)
            self._table = self._table[:0]
        elif kind == "longrope":
            parameters = module.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            window = parameters["original_max_position_embeddings"]
            if max_model_len > window:
                short = self._ask(window)[1]
                self._table, self._window = torch.cat((short, self._table)), window
        elif kind not in STATIC_ROPE_TYPES:
            raise ValueError(f"rope_type {kind!r}")

    @property
    def uses_prompt_lens(self) -> bool:
        return self._window is not None or self._frequencies is not None

    @property
    def dim(self) -> int:
        """The number of a head's entries that rotate."""
        return int(self._table.shape[1])

    def to(self, device: torch.device) -> None:
        self._table = self._table.to(device)
        if self._frequencies is not None:
            self._frequencies = self._frequencies.to(device)

    def rotation(self, positions: torch.Tensor, prompt_lens: torch.Tensor | None) -> Rotation:
        """As `Rotary.rotation`."""
        if not self.uses_prompt_lens:
            return Rotation(positions, self._table)
        assert prompt_lens is not None, "the angles need the prompt length of every token"
        rope_lens = torch.maximum(prompt_lens, positions + 1)
        if self._frequencies is not None:
            angles = positions.unsqueeze(1).float() * self._frequencies[rope_lens]
            rows = torch.arange(len(positions), device=positions.device, dtype=positions.dtype)
            return Rotation(rows, torch.cat((angles.cos(), angles.sin()), dim=1) * self._scaling)
        assert self._window is not None
        rows = torch.where(rope_lens > self._window, positions + self._window, positions)
        return Rotation(rows, self._table)

    def as_module(
        self, rotation: Rotation, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, T, dim] in the module's layout."""
        halves = rotation.cos_sin.index_select(0, rotation.rows).to(dtype).chunk(2, dim=1)
        cos, sin = (LAYOUTS[self.layout](half)[None] for half in halves)
        return cos, sin

    def _ask(self, num_positions: int) -> tuple[str, torch.Tensor]:
        """The module's layout, and its cosines and sines, float32 [num_positions, dim]."""
        x, positions = torch.zeros(1), torch.arange(num_positions).unsqueeze(0)
        arguments = () if self._layer_type is None else (self._layer_type,)
        cos, sin = (each[0] for each in self._module(x, positions, *arguments))
        num_angles = getattr(self._module, _prefixed(self._layer_type, "inv_freq")).shape[-1]
        for name, lay_out in LAYOUTS.items():
            halves = [full[:, :: 2 if name == "interleaved" else 1] for full in (cos, sin)]
            halves = [half[:, :num_angles] for half in halves]
            if all(map(torch.equal, map(lay_out, halves), (cos, sin))):
                return name, torch.cat(halves, dim=1)
        raise ValueError("angles in an order of its own")

    def _compute(self, kind: str, lengths: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Frequencies [lengths, dim / 2], and the factor of cosines and sines."""
        compute: Any = ROPE_INIT_FUNCTIONS[kind]
        config, types = self._module.config, {}
        if self._layer_type is not None:
            types["layer_type"] = self._layer_type
        found: tuple[torch.Tensor, float] = compute(config, None, seq_len=lengths, **types)
        return found


def _prefixed(layer_type: str | None, name: str) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


class _GivesAngles(nn.Module):
    """A rotary module that returns the step's angles."""

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = getattr(self, ANGLES)[layer_type]
        if x.device.type == "meta":  # the trial needs their shape only
            shape = (1, position_ids.shape[-1], rotary.dim // (1 + (rotary.layout == "single")))
            return x.new_empty(shape), x.new_empty(shape)
        rotation: Rotation = getattr(self, HANDLER).rotations[rotary]
        return rotary.as_module(rotation, x.dtype)


def replace_angles(module: Any, by_type: dict[str | None, StepRotary]) -> None:
    setattr(module, ANGLES, by_type)
    module.__class__ = type(type(module).__name__, (_GivesAngles, type(module)), {})


def rotary_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "rope_type")]
