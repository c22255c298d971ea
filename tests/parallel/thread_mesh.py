"""Ranks as threads of one process, without sockets: for sharded models by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from queue import Queue
from typing import TypeVar

import torch

from asyncllm.kernels.all_reduce import PeerWords
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
    """Shared by the ranks of one engine: a meeting of each stage, and what is on its way to each
    rank; and by those of all engines: a meeting of the ranks of each number, and one of all."""

    stages: list[Meeting]
    sent: list[Queue[torch.Tensor]]
    peers: list[Meeting]
    everyone: Meeting


class ThreadMesh:
    """Implements `Mesh`."""

    def __init__(self, config: MeshConfig, program: Program) -> None:
        self.config = config
        self.num_calls = 0
        self.row_slots: torch.Tensor | None = None
        self._program = program

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self._exchange(x, self._stage)))

    def row_sums(self, x: torch.Tensor) -> None:
        return None

    def share_words(self, num_bytes: int) -> PeerWords | None:
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

    @contextmanager
    def rows_of(self, slots: torch.Tensor) -> Iterator[None]:
        self.row_slots = slots
        try:
            yield
        finally:
            self.row_slots = None

    def gather_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat(self._meet_peers(tensor)) for tensor in tensors]

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self._meet_peers(x)).chunk(self.config.dp)[self.config.engine]

    def least(self, number: int) -> int:
        numbers = self._exchange(torch.tensor(number), self._program.everyone)
        return min(int(each) for each in numbers)

    def close(self) -> None:
        """It has nothing."""

    @property
    def _stage(self) -> Meeting:
        return self._program.stages[self.config.stage]

    def _meet_peers(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._exchange(x, self._program.peers[self.config.rank])

    def _exchange(self, x: torch.Tensor, meeting: Meeting) -> list[torch.Tensor]:
        """The tensors of all who meet, in the order of their engines and ranks."""
        meeting.brought[self.config.engine * self.config.size + self.config.rank] = x.clone()
        meeting.barrier.wait(PATIENCE_SECONDS)
        tensors = [meeting.brought[rank] for rank in sorted(meeting.brought)]
        meeting.barrier.wait(PATIENCE_SECONDS)
        return tensors


def on_ranks(
    num_places: int,
    work: Callable[[ThreadMesh], T],
    by_expert: bool = False,
    num_stages: int = 1,
    num_engines: int = 1,
) -> list[T]:
    """The result of each rank with its mesh, engine by engine."""
    num_ranks = num_places * num_stages

    def meetings(number: int, num_who_meet: int) -> list[Meeting]:
        return [Meeting(threading.Barrier(num_who_meet)) for _ in range(number)]

    (everyone,), peers = meetings(1, num_engines * num_ranks), meetings(num_ranks, num_engines)
    programs = [
        Program(meetings(num_stages, num_places), [Queue() for _ in range(num_ranks)], peers,
                everyone)
        for _ in range(num_engines)
    ]  # fmt: skip

    @torch.inference_mode()
    def of(engine: int, rank: int) -> T:
        config = MeshConfig(num_places, rank, by_expert, num_stages, num_engines, engine)
        try:
            return work(ThreadMesh(config, programs[engine]))
        except BaseException:
            stages = [stage for program in programs for stage in program.stages]
            for meeting in (*stages, *peers, everyone):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_engines * num_ranks) as threads:
        numbers = product(range(num_engines), range(num_ranks))
        futures = [threads.submit(of, *number) for number in numbers]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
