"""The adapters of a layer's experts: two low-rank matrices for each expert and product.

As of a linear layer whose experts are parts (lora.py): gate and up have a matrix `a` each, so that
files which adapt them apart and those which adapt their stacked tensor are served alike. One slot
after the other adds to its rows, in products that are grouped as those of the experts: shapes
depend on the number of tokens alone, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from asyncllm.mesh_config import MeshConfig
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.layers.lora_places import Place
from asyncllm.types import NO_ADAPTER


class LoRAExperts:
    """name: of the experts in the checkpoint; `shape.parts`: of gate, up and down below one."""

    def __init__(self, rows: LoRALayers, name: str, shape: ExpertsShape, mesh: MeshConfig) -> None:
        """rows: whose slots those of a step's rows are."""
        self._rows, self._owner = rows, (owner := rows.of_experts)
        self._name, self.shape = name, shape
        self._among_engines: torch.Tensor | None = None
        self._share = share = shape.share(mesh)
        experts, size = (part.stop - part.start for part in (share.experts, share.size))
        rank, hidden = owner.max_rank, shape.hidden_size
        self.shapes = (
            (experts, 2 * rank, hidden),
            (experts, 2 * size, rank),
            (experts, rank, size),
            (experts, hidden, rank),
        )

    @property
    def names(self) -> set[str]:
        """In the checkpoint, and in transformers, which peft names them by."""
        return {self._name, self._name.replace(".block_sparse_moe.", ".mlp.")}

    def bind(self, _: int, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def kind(self, _: Sequence[torch.Tensor]) -> int:
        return 0  # which nothing here asks for

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        """One for each expert and product."""
        own, size = self._share.experts, self._share.size
        wide = self.shape.hidden_size, self.shape.size  # inputs, outputs
        narrow = wide[1], wide[0]
        rows = torch.arange(self.shape.size)[size]
        nothing = tensors[0].new_empty(0)
        for expert in range(self.shape.num_experts):
            gate, up, down = (f"{self._name}.{expert}.{part}" for part in self.shape.parts)
            if not own.start <= expert < own.stop:
                yield gate, Place(*wide, None, nothing)
                yield up, Place(*wide, None, nothing)
                yield down, Place(*narrow, None, nothing)
                continue
            gate_up_a, gate_up_b, down_a, down_b = (each[expert - own.start] for each in tensors)
            (gate_a, up_a), (gate_b, up_b) = gate_up_a.chunk(2), gate_up_b.chunk(2)
            yield gate, Place(*wide, gate_a, gate_b, rows=rows)
            yield up, Place(*wide, up_a, up_b, rows=rows)
            yield down, Place(*narrow, down_a, down_b, columns=size)

    @property
    def is_used(self) -> bool:
        return self._rows.rows is not None

    @property
    def slots_among_engines(self) -> list[torch.Tensor]:
        """The slots of the rows of the pass that runs, int32 [T, 1], as all engines count them;
        none where it has no adapters."""
        if self._rows.rows is None:
            return []
        slots = self._rows.rows.slots.int()
        return [torch.where(slots == NO_ADAPTER, slots, slots + self._rows.first_slot)[:, None]]

    def select(self, slots: list[torch.Tensor]) -> None:
        """The same of the rows of all engines, which are computed here."""
        self._among_engines = slots[0].flatten() if slots else None

    def row_slots(self, tokens: torch.Tensor) -> torch.Tensor:
        """The adapter slots of rows that belong to these tokens: [rows]."""
        if self._among_engines is not None:
            return self._among_engines[tokens]
        assert self._rows.rows is not None
        return self._rows.rows.slots[tokens]

    def add_gate_up(
        self, product: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """product [rows, 2 * size] of rows [rows, hidden], in place. ends: int32 [experts]."""
        a, b = self._tensors[:2]
        return self._add(product, rows, a, b, slots, ends)

    def add_down(
        self, product: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """product [rows, hidden] of rows [rows, size], in place."""
        a, b = self._tensors[2:]
        return self._add(product, rows, a, b, slots, ends)

    def _add(
        self,
        product: torch.Tensor,
        rows: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        slots: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        num_parts = a.shape[2] // self._owner.max_rank
        for slot in range(1, len(a)):
            shrunk = F.grouped_mm(rows, a[slot].transpose(1, 2), offs=ends)
            shrunk = torch.where((slots == slot).unsqueeze(1), shrunk, 0)
            parts = zip(
                shrunk.chunk(num_parts, dim=1),
                b[slot].chunk(num_parts, dim=1),
                product.chunk(num_parts, dim=1),
                strict=True,
            )
            for h, features, out in parts:
                out += F.grouped_mm(h.contiguous(), features.transpose(1, 2), offs=ends)
        return product
