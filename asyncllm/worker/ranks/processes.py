"""Ranks beyond the first that rank 0 starts on its own host, a process each."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from asyncllm.child_process import start_child
from asyncllm.config import EngineConfig

FOLLOWER = "asyncllm.worker.ranks.follower"
EXIT_SECONDS = 5.0  # for a rank to end by itself


class Ranks(Protocol):
    """Ranks beyond the first, wherever they run."""

    numbers: Sequence[int]
    host: str  # rank 0's address, as they and rank 0 itself reach it

    def start(self) -> dict[int, socket.socket]:
        """A connection to each. Called once, in the thread that serves the connections."""

    def why_lost(self, rank: int) -> str | None:
        """Why its connection has ended, where that is known."""

    def kill(self) -> None:
        """At once, whatever they do. From any thread."""

    def close(self) -> None:
        """Returns when they have ended. Their connections are closed already."""


class ChildRanks:
    """Implements `Ranks`."""

    def __init__(self, config: EngineConfig, numbers: Sequence[int], host: str) -> None:
        self.numbers = numbers
        self.host = host
        self._config = config
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> dict[int, socket.socket]:
        """Raises `OSError`."""
        sockets = {}
        for rank in self.numbers:
            sockets[rank], theirs = socket.socketpair()
            with theirs:
                environment = _environment(self._config, rank)
                self._processes[rank] = start_child(FOLLOWER, environment, theirs)
        return sockets

    def why_lost(self, rank: int) -> str | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"its process ended with {self._processes[rank].wait(0.2)}"
        return None

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        until = time.monotonic() + EXIT_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()


def _environment(config: EngineConfig, rank: int) -> dict[str, str]:
    """A rank's device is the first that it sees; it sees them all, as NCCL asks for. Ranks on CPUs
    divide the cores, where nothing says otherwise."""
    if config.device == "cuda":
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
        others = [device for place, device in enumerate(devices) if place != rank]
        return {"CUDA_VISIBLE_DEVICES": ",".join((devices[rank], *others))}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // config.mesh.size))}
