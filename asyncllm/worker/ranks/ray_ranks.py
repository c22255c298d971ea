"""Ranks that a Ray cluster places, starts, watches and logs; steps travel by our sockets.

Ray reserves a place for each rank, rank 0's on its own host, and runs a task on each other: it
joins rank 0 with a secret made for this start and then waits for the process that does the work.
Needs `asyncllm[ray]`. On GPUs it has not been run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncllm.child_process import start_child
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelLoadError, one_line
from asyncllm.worker.ranks.handshake import join
from asyncllm.worker.ranks.joining import JOIN_SECONDS, JoinedRanks
from asyncllm.worker.ranks.processes import EXIT_SECONDS, FOLLOWER

CONNECT_SECONDS = 30.0
CHECK_SECONDS = 0.5


def connect_to_ray() -> bool:
    """Whether this made the connection, which the application may have. Raises `ValueError`."""
    if ray.is_initialized():
        return False
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), configure_logging=False)
    except ConnectionError as error:
        raise ValueError(
            f"distributed_executor_backend ray: {one_line(error)}; `ray start --head` begins a "
            "cluster, RAY_ADDRESS names another"
        ) from error
    return True


class RayRanks:
    """Implements `Ranks`. `address`: of this host, for the others; None: as Ray knows it."""

    def __init__(
        self,
        config: EngineConfig,
        numbers: Sequence[int],
        address: str | None,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Raises `ValueError` where there is no cluster, `OSError`."""
        self.numbers = numbers
        self._is_ours = connect_to_ray()
        self.host = address or ray.util.get_node_ip_address()
        self._secret = secrets.token_bytes(32)
        self._is_cancelled = is_cancelled
        self._joined = JoinedRanks((self.host, 0), self._secret, numbers, self._check)
        unit = "GPU" if config.device == "cuda" else "CPU"
        self._needs = {"num_gpus": int(unit == "GPU"), "num_cpus": int(unit == "CPU")}
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        self._group = placement_group([{unit: 1, **here}, *({unit: 1} for _ in numbers)], "PACK")
        self._tasks: dict[int, Any] = {}

    def start(self) -> dict[int, socket.socket]:
        """Raises `ModelLoadError`, `ValueError`."""
        self._reserve()
        for rank, bundle in zip(self.numbers, self._bundles(), strict=True):
            task = self._run(_be_rank, bundle, f"asyncllm rank {rank}")
            self._tasks[rank] = task.remote(*self._joined.address, self._secret, rank)
        return self._joined.start()

    def why_lost(self, rank: int) -> str | None:
        if not ray.is_initialized():
            return "the application has left Ray"
        done, _ = ray.wait([self._tasks[rank]], timeout=1.0)
        return _end_of(done[0]) if done else None

    def kill(self) -> None:
        self._joined.kill()
        if ray.is_initialized():  # else its tasks have ended; a call would begin another cluster
            for task in self._tasks.values():
                ray.cancel(task, force=True)

    def close(self) -> None:
        self._joined.close()
        if not ray.is_initialized():
            return
        if tasks := [*self._tasks.values()]:
            _, running = ray.wait(tasks, num_returns=len(tasks), timeout=EXIT_SECONDS)
            for task in running:
                ray.cancel(task, force=True)
        remove_placement_group(self._group)
        if self._is_ours:
            ray.shutdown()

    # --- start -------------------------------------------------------------------------------

    def _reserve(self) -> None:
        ready, until = self._group.ready(), time.monotonic() + JOIN_SECONDS
        while not ray.wait([ready], timeout=CHECK_SECONDS)[0]:
            if self._is_cancelled():
                raise ModelLoadError("the start is cancelled")
            if time.monotonic() > until:
                raise ModelLoadError(
                    f"Ray has no place for {len(self.numbers) + 1} ranks of "
                    f"{self._group.bundle_specs[-1]}: free are {ray.available_resources()}"
                )
        if self._needs["num_gpus"]:
            (own,) = ray.get(self._run(_gpu_ids, 0, "asyncllm rank 0").remote())
            if str(own) != os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]:
                raise ValueError(f"Ray gives rank 0 GPU {own}: set CUDA_VISIBLE_DEVICES={own}")

    def _bundles(self) -> list[int]:
        """The ranks beyond the first: neighbours are on one host, the first on this one."""
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return sorted(range(1, len(nodes)), key=lambda i: (nodes[i] != nodes[0], nodes[i], i))

    def _run(self, work: Callable[..., Any], bundle: int, name: str) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, bundle)
        return ray.remote(work).options(
            name=name, scheduling_strategy=place, max_retries=0, **self._needs
        )

    def _check(self) -> bool:
        """While ranks are waited for. Raises `ModelLoadError` for one that has ended."""
        done, _ = ray.wait([*self._tasks.values()], timeout=0)
        if done:
            raise ModelLoadError(f"a rank that Ray started is gone: {_end_of(done[0])}")
        return self._is_cancelled()


def _end_of(task: Any) -> str:
    try:
        return f"its process ended with {ray.get(task)}"
    except RayError as error:
        return one_line(error)


def _be_rank(host: str, port: int, secret: bytes, rank: int) -> int:
    """In a process of Ray's: the exit code of the rank's own, which ends with this one."""
    with socket.create_connection((host, port), CONNECT_SECONDS) as connected:
        asyncio.run(join(connected, secret, rank))
        connected.setblocking(True)
        process = start_child(FOLLOWER, {}, connected)
    return process.wait()


def _gpu_ids() -> list[int]:
    found: list[int] = ray.get_gpu_ids()
    return found
