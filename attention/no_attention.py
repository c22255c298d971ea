"""The attention of a model that has none: all its layers are recurrent."""

from __future__ import annotations

import torch

from asyncllm.attention.base import (
    Attend,
    AttendRows,
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    RotatedHeads,
    Rotation,
)


class NoAttention:
    """An `AttentionBackend` whose functions are never called with a layer."""

    supports_graphs = True

    def decode(self, rows: DecodeRows) -> Attend:
        return _attend

    def write(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor | RotatedHeads,
        rotation: Rotation | None,
        write_slots: torch.Tensor,
        q: torch.Tensor,
    ) -> None:
        _attend(layer, qkv, rotation)

    def mixed(
        self, decodes: DecodeRows | None, prefills: PrefillRows, q: torch.Tensor, out: torch.Tensor
    ) -> AttendRows:
        def attend_rows(layer: AttentionLayer) -> None:
            raise AssertionError(f"attention layer {layer.index} of a model that has none")

        return attend_rows

    def step_attention(self, max_tokens: int) -> None:
        return None


def _attend(
    layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
) -> torch.Tensor:
    raise AssertionError(f"attention layer {layer.index} of a model that has none")
