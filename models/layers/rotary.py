"""Rotary position embedding (RoPE): the angles. Attention backends apply them.

Frequencies of the scaled variants come from transformers' `ROPE_INIT_FUNCTIONS`, so they equal the
reference. All variants but `dynamic` use a table of max_model_len positions. With `dynamic` (NTK)
the frequencies depend on a length, and a table is built for each step.

The length is per token, so that a token's rotation depends on its own sequence only:

    rope_len = max(window, prompt length, position + 1)

So does transformers' `generate` with a cache for a single sequence: a prompt longer than the window
uses the frequencies of its full length, and each later token those of the length at that point. In
a batch transformers differs: it uses the length of the longest row, and keeps the frequencies of a
longer sequence until one below the window comes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.nn.functional import pad
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from asyncllm.attention.base import AttentionLayer, Rotation
from asyncllm.errors import UnsupportedModelError
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build

SCALED_ROPE_TYPES = ("linear", "llama3", "yarn")
ROPE_TYPES = ("default", *SCALED_ROPE_TYPES, "longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The order of a head's entries. The first `rotary_dim` entries rotate: entry i with entry
    i + rotary_dim / 2, or if `interleaved` 2i with 2i + 1.

    Scores do not depend on the order of entries, if it is the same for q and k. So their weights
    are loaded in an order where pairs are half a head apart; entries that do not rotate have angle
    0.
    """

    head_dim: int
    rotary_dim: int
    interleaved: bool = False

    def entries(self) -> torch.Tensor:
        """The checkpoint's entry at each place: int64 [head_dim]."""
        assert self.head_dim % 2 == self.rotary_dim % 2 == 0 < self.rotary_dim <= self.head_dim
        rotated = torch.arange(self.rotary_dim)
        pairs = rotated.view(-1, 2).T if self.interleaved else rotated.view(2, -1)
        others = torch.arange(self.rotary_dim, self.head_dim).view(2, -1)
        return torch.cat((pairs, others), dim=1).flatten()

    def rows(self, layer: AttentionLayer, packed: bool) -> dict[str, torch.Tensor]:
        """Projection -> the checkpoint's output at each place, int64 [outputs]. packed: q, k and v
        are one projection."""
        kv_heads = layer.num_kv_heads
        q, k = self._rows(0, layer.num_heads), self._rows(0, kv_heads)
        if not packed:
            return {"q_proj": q, "k_proj": k}
        k = self._rows(layer.num_heads, kv_heads)
        end = len(q) + len(k)
        return {"qkv_proj": torch.cat((q, k, torch.arange(end, end + len(k))))}

    def _rows(self, first_head: int, num_heads: int) -> torch.Tensor:
        heads = torch.arange(first_head, first_head + num_heads).unsqueeze(1) * self.head_dim
        return (heads + self.entries()).flatten()

    def load(self, load: Load) -> Load:
        """Reorder a weight whose last dimension has a value per entry."""
        entries, then = self.entries(), load.transform or (lambda loaded: loaded)
        return replace(load, transform=lambda loaded: then(loaded)[..., entries.to(loaded.device)])


class Rotary(Protocol):
    @property
    def uses_prompt_lens(self) -> bool: ...

    def rotation(self, positions: torch.Tensor, prompt_lens: torch.Tensor | None) -> Rotation:
        """The angles of a step's tokens.

        positions: int32 or int64 [T]. prompt_lens: the prompt length of each token's sequence,
        int32 or int64 [T]; None unless `uses_prompt_lens`.
        """
        ...


class StaticRotary:
    """A table of all positions. A token's row is its position."""

    uses_prompt_lens = False

    def __init__(self, inv_freq: torch.Tensor, scaling: float, head_dim: int, build: Build) -> None:
        """inv_freq: float32 [rotary_dim / 2]. scaling: multiplies cosines and sines (YaRN)."""
        self._table = _table(inv_freq, scaling, head_dim, build).to(build.device)

    def rotation(self, positions: torch.Tensor, prompt_lens: torch.Tensor | None) -> Rotation:
        return Rotation(positions, self._table)


class LongRotary:
    """longrope: two tables of all positions, for sequences within the window and for longer
    ones."""

    uses_prompt_lens = True

    def __init__(
        self, frequencies: list[torch.Tensor], scaling: float, window: int, head_dim: int,
        build: Build,
    ) -> None:  # fmt: skip
        """frequencies: of the two tables, as for `StaticRotary`."""
        tables = [_table(inv_freq, scaling, head_dim, build) for inv_freq in frequencies]
        self._table = torch.cat(tables).to(build.device)
        self._window = window
        self._max_model_len = build.max_model_len

    def rotation(self, positions: torch.Tensor, prompt_lens: torch.Tensor | None) -> Rotation:
        assert prompt_lens is not None, "longrope needs the prompt length of every token"
        is_long = torch.maximum(prompt_lens, positions + 1) > self._window
        rows = torch.where(is_long, positions + self._max_model_len, positions)
        return Rotation(rows, self._table)


class DynamicRotary:
    """Dynamic NTK: a table with a row per token, whose base grows with its sequence's length beyond
    the window."""

    uses_prompt_lens = True

    def __init__(
        self, base: float, rotary_dim: int, factor: float, window: int, head_dim: int, build: Build
    ) -> None:
        self._base = base
        self._head_dim = head_dim
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
        return Rotation(rows, _cos_sin(positions[:, None].float() * inv_freq, self._head_dim))


def build_rotary(
    config: ModelConfig,
    build: Build,
    order: HeadOrder | None = None,
    layer_type: str | None = None,
) -> Rotary:
    """The variant of `rope_parameters`, or of its entry for a layer type.

    Raises `UnsupportedModelError` naming the parameter that is not supported.
    """
    parameters: dict[str, Any] = config.hf_config.rope_parameters or {}
    if layer_type is not None:
        parameters = parameters.get(layer_type) or {}
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise _error(config, f"rope_type {rope_type!r} is none of {', '.join(ROPE_TYPES)}")
    if order is None and parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise _error(config, "partial_rotary_factor other than 1 is not supported")
    try:
        head_dim = config.head_dim if order is None else order.head_dim
        rotary_dim = head_dim if order is None else order.rotary_dim
        if rope_type == "dynamic":
            return DynamicRotary(
                base=parameters["rope_theta"],
                rotary_dim=rotary_dim,
                factor=parameters["factor"],
                window=config.max_position_embeddings,
                head_dim=head_dim,
                build=build,
            )
        if rope_type == "default":
            inv_freq = 1.0 / parameters["rope_theta"] ** _exponents(rotary_dim)
            return StaticRotary(inv_freq, 1.0, head_dim, build)
        compute = ROPE_INIT_FUNCTIONS[rope_type]
        inv_freq, scaling = compute(config.hf_config, layer_type=layer_type)
        if len(inv_freq) != rotary_dim // 2:
            raise ValueError(f"{len(inv_freq)} frequencies for {rotary_dim} entries of a head")
        if rope_type == "longrope":
            window = int(parameters["original_max_position_embeddings"])
            if window >= build.max_model_len:
                return StaticRotary(inv_freq, scaling, head_dim, build)
            long, _ = compute(config.hf_config, seq_len=window + 1, layer_type=layer_type)
            return LongRotary([inv_freq, long], scaling, window, head_dim, build)
        return StaticRotary(inv_freq, scaling, head_dim, build)
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise _error(config, f"{rope_type}: {type(error).__name__}: {error}") from error


def no_rotary(head_dim: int, build: Build) -> Rotary:
    """For layers without positions: all angles are 0."""
    return StaticRotary(torch.zeros(head_dim // 2), 1.0, head_dim, build)


def _table(inv_freq: torch.Tensor, scaling: float, head_dim: int, build: Build) -> torch.Tensor:
    """Cosines and sines of all positions: float32 [max_model_len, head_dim]."""
    # Arithmetic on the meta device would import torch's compiler, which takes seconds.
    device = torch.device("cpu") if build.device.type == "meta" else build.device
    positions = torch.arange(build.max_model_len, device=device)
    angles = positions[:, None].float() * inv_freq.to(device)
    table = _cos_sin(angles, head_dim)
    table.view(len(table), 2, -1)[..., : angles.shape[1]].mul_(scaling)
    return table


def _exponents(rotary_dim: int) -> torch.Tensor:
    """Frequency i is base ** -exponents[i]: float32 [rotary_dim / 2]."""
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _cos_sin(angles: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[rows, rotary_dim / 2] -> [rows, head_dim], cosines then sines: 1 and 0 where nothing
    rotates."""
    cos, sin = angles.cos(), angles.sin()
    if num_still := head_dim // 2 - angles.shape[1]:
        cos, sin = pad(cos, (0, num_still), value=1.0), pad(sin, (0, num_still))
    return torch.cat((cos, sin), dim=-1)


def _error(config: ModelConfig, message: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{config.path / 'config.json'}: rope_parameters: {message}")
