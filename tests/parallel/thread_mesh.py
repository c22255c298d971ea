"""Ranks as threads of one process, without sockets: for sharded models by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import TypeVar

import torch

from asyncllm.mesh_config import MeshConfig

T = TypeVar("T")
PATIENCE_SECONDS = 60


@dataclass
class Meeting:
    """The tensors that ranks bring to one call."""

    barrier: threading.Barrier
    brought: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Program:
    """Shared by ranks: a meeting of each stage and one of all, and what is on its way to each
    rank."""

    stages: list[Meeting]
    everyone: Meeting
    sent: list[Queue[torch.Tensor]]


class ThreadMesh:
    """Implements `Mesh`."""

    def __init__(self, config: MeshConfig, program: Program) -> None:
        self.config = config
        self._program = program

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self._exchange(x, self._stage)))

    def row_sums(self, x: torch.Tensor) -> None:
        return None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x, self._stage), dim=1)

    def send(self, x: torch.Tensor) -> None:
        to = (self.config.rank + self.config.tp) % self.config.size
        self._program.sent[to].put(x.clone())

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._program.sent[self.config.rank].get(timeout=PATIENCE_SECONDS))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x, self._stage)[0])

    def least(self, number: int) -> int:
        numbers = self._exchange(torch.tensor(number), self._program.everyone)
        return min(int(each) for each in numbers)

    def close(self) -> None:
        """It has nothing."""

    @property
    def _stage(self) -> Meeting:
        return self._program.stages[self.config.stage]

    def _exchange(self, x: torch.Tensor, meeting: Meeting) -> list[torch.Tensor]:
        """The tensors of all who meet, in the order of their ranks."""
        meeting.brought[self.config.rank] = x.clone()
        meeting.barrier.wait(PATIENCE_SECONDS)
        tensors = [meeting.brought[rank] for rank in sorted(meeting.brought)]
        meeting.barrier.wait(PATIENCE_SECONDS)
        return tensors


def on_ranks(
    num_places: int,
    work: Callable[[ThreadMesh], T],
    by_expert: bool = False,
    num_stages: int = 1,
) -> list[T]:
    """The result of each rank with its mesh."""
    num_ranks = num_places * num_stages
    stages = [Meeting(threading.Barrier(num_places)) for _ in range(num_stages)]
    everyone = Meeting(threading.Barrier(num_ranks))
    program = Program(stages, everyone, [Queue() for _ in range(num_ranks)])

    @torch.inference_mode()
    def of(rank: int) -> T:
        try:
            return work(ThreadMesh(MeshConfig(num_places, rank, by_expert, num_stages), program))
        except BaseException:
            for meeting in (*stages, everyone):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(of, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
