"""Ranks as threads of one process, without sockets: for sharded models by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from asyncllm.mesh_config import MeshConfig

T = TypeVar("T")
PATIENCE_SECONDS = 60


@dataclass
class Meeting:
    """The tensors that the ranks bring to one call."""

    barrier: threading.Barrier
    brought: dict[int, torch.Tensor] = field(default_factory=dict)


class ThreadMesh:
    """Implements `Mesh`. `num_bytes`: that it was given to sum or to gather."""

    def __init__(self, config: MeshConfig, meeting: Meeting) -> None:
        self.config = config
        self._meeting = meeting

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self._exchange(x)))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x)[0])

    def least(self, number: int) -> int:
        return min(int(each) for each in self._exchange(torch.tensor(number)))

    def close(self) -> None:
        """It has nothing."""

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors, in their order."""
        brought = self._meeting.brought
        brought[self.config.rank] = x.clone()
        self._meeting.barrier.wait(PATIENCE_SECONDS)
        tensors = [brought[rank] for rank in sorted(brought)]
        self._meeting.barrier.wait(PATIENCE_SECONDS)
        return tensors


def on_ranks(num_ranks: int, work: Callable[[ThreadMesh], T], by_expert: bool = False) -> list[T]:
    """What each rank makes of its mesh."""
    meeting = Meeting(threading.Barrier(num_ranks))

    @torch.inference_mode()
    def of(rank: int) -> T:
        try:
            return work(ThreadMesh(MeshConfig(num_ranks, rank, by_expert), meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(of, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
