"""Calls between the ranks that share a model, in a step; each call is made by all of them.

`Alone` is the mesh of one rank, and of models without memory, which are built and never run. Models
ask `config` for their share when they are built, so that one rank's step has no call in it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from asyncllm.kernels.all_reduce import PeerWords, RowSums
from asyncllm.mesh_config import MeshConfig


class Mesh(Protocol):
    """All ranks call the same methods in the same order, with tensors of the same shapes."""

    @property
    def config(self) -> MeshConfig: ...

    @property
    def num_calls(self) -> int:
        """So far; on a CPU those that have ended. For any thread."""
        ...

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the stage's tensors, in place; equal to the last bit on all its ranks."""
        ...

    def row_sums(self, x: torch.Tensor) -> RowSums | None:
        """How a kernel of the caller's is to add up the stage's tensors x [T, size], instead of
        `reduce`; None: there is no way. Only what `reduce` would have done may be done by it."""
        ...

    def share_words(self, num_bytes: int) -> PeerWords | None:
        """Memory of the stage's ranks, this many bytes each, that all of them address; once. None
        on all of them: there is no way."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, n] -> [rows, tp * n], in the order of the stage's ranks."""
        ...

    def send(self, x: torch.Tensor) -> None:
        """To the rank of this place in the next stage; from the last stage to the first. Waits for
        no receiver; x may be overwritten afterwards."""
        ...

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Receive into x what the rank of this place in the stage before sends."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in place, on the ranks of the first stage, which alone call it."""
        ...

    def rows_of(self, slots: torch.Tensor) -> AbstractContextManager[None]:
        """For a pass of rows of these slots, int32 [rows]: engines that share experts pad each
        other's steps, and padding needs no experts."""
        ...

    @property
    def row_slots(self) -> torch.Tensor | None:
        """The slots that `rows_of` was given, in a pass of engines that share experts."""
        ...

    def gather_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """[rows, n] each -> [dp * rows, n]: of the ranks of this number of all engines, below each
        other in the order of the engines."""
        ...

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[dp * rows, n] -> [rows, n]: this engine's rows of the sum of those ranks' tensors."""
        ...

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks of all stages and engines have. Waits for the
        device."""
        ...

    def close(self) -> None:
        """End calls that wait for other ranks, with an error. From any thread."""
        ...

    def wait_closed(self) -> None:
        """After `close`, and when captured graphs are gone: until memory is given back."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    config: MeshConfig = field(default_factory=MeshConfig)
    num_calls: int = 0
    row_slots: None = None

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def row_sums(self, x: torch.Tensor) -> None:
        return None

    def share_words(self, num_bytes: int) -> None:
        return None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor) -> None:
        """There is no other stage."""

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def rows_of(self, slots: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def gather_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(tensors)

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def least(self, number: int) -> int:
        return number

    def close(self) -> None:
        """Nobody is told."""

    def wait_closed(self) -> None:
        """It has nothing."""


ALONE = Alone()
