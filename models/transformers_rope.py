"""The angles of transformers' rotary modules, one row of a table for each token.

A static module is asked for the angles of all positions, once. With longrope and dynamic NTK the
angles depend on the length of a sequence, of which a packed row has several: their modules give
the angles that are worked out here, each token's by its own sequence (models/layers/rotary.py says
by which length).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from asyncllm.attention.base import Rotation

HANDLER = "asyncllm_attention"  # the attribute of modules with the step that runs
ANGLES = "asyncllm_angles"  # of rotary modules that give the step's, by type of layers
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
# How a module lays out its cosines and sines [T, dim / 2] over the entries of a head.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half": lambda x: torch.cat((x, x), dim=-1),
    "interleaved": lambda x: x.repeat_interleave(2, dim=-1),
    "single": lambda x: x,
}


class StepRotary:
    """One module's, of one type of its layers."""

    def __init__(self, module: Any, layer_type: str | None, max_model_len: int) -> None:
        """The module's buffers are on the CPU. Raises `ValueError` where it is none of these."""
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        self._module, self._layer_type = module, layer_type
        self.by_length = kind not in STATIC_ROPE_TYPES  # its module would ask for lengths
        self._frequencies: torch.Tensor | None = None  # dynamic: by length
        self._scaling = 1.0
        self._window: int | None = None  # longrope: longer sequences have the table's second part
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
        """Entries of a head that rotate."""
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
        return Rotation(positions + self._window * (rope_lens > self._window), self._table)

    def as_module(
        self, rotation: Rotation, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, T, dim] as the module returns them."""
        halves = rotation.cos_sin.index_select(0, rotation.rows).to(dtype).chunk(2, dim=1)
        cos, sin = (LAYOUTS[self.layout](half)[None] for half in halves)
        return cos, sin

    def _ask(self, num_positions: int) -> tuple[str, torch.Tensor]:
        """The module's layout, and float32 [num_positions, dim]: cosines, then sines."""
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
        """Frequencies [lengths, dim / 2], and what multiplies cosines and sines."""
        compute: Any = ROPE_INIT_FUNCTIONS[kind]
        config, types = self._module.config, {}
        if self._layer_type is not None:
            types["layer_type"] = self._layer_type
        found: tuple[torch.Tensor, float] = compute(config, None, seq_len=lengths, **types)
        return found


def _prefixed(layer_type: str | None, name: str) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


class _GivesAngles(nn.Module):
    """A rotary module whose angles are the step's."""

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = getattr(self, ANGLES)[layer_type]
        if x.device.type == "meta":  # the trial, which asks for their shape
            shape = (1, position_ids.shape[-1], rotary.dim // (1 + (rotary.layout == "single")))
            return x.new_empty(shape), x.new_empty(shape)
        rotation: Rotation = getattr(self, HANDLER).rotations[rotary]
        return rotary.as_module(rotation, x.dtype)


def replace_angles(module: Any, by_type: dict[str | None, StepRotary]) -> None:
    setattr(module, ANGLES, by_type)
    module.__class__ = type(type(module).__name__, (_GivesAngles, type(module)), {})


def rotary_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "rope_type")]
