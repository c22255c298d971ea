"""Rank 0's side of the other ranks: it starts them, tells them each step, and notices who is lost.

    event loop        send_step, send_command: in the order of rank 0's own launches
    asyncllm-ranks    the sockets; starts the processes; asks each rank twice a second how far it is

A rank is lost when its process or its connection ends, when it says that it failed, when it does
not answer, or when it has work and gets no further, each for `distributed_timeout_seconds`. One
that is lost takes the group with it: the others are killed, which ends rank 0's own waiting for
them with an error, and `failure` says which rank it was and why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncllm.config import EngineConfig
from asyncllm.models.parallel.collectives import CollectiveMesh, open_store
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.worker.packed_step import PackedStep
from asyncllm.worker.ranks.connection import PeerThread
from asyncllm.worker.ranks.messages import (
    CaptureGraph,
    ClearPages,
    Kind,
    Message,
    WorkerCommand,
    encode,
    encode_config,
    step_content,
)

logger = logging.getLogger("asyncllm")

HOST = "127.0.0.1"
FOLLOWER = "asyncllm.worker.ranks.follower"
EXIT_SECONDS = 5.0  # for a rank to end by itself


class RankLostError(RuntimeError):
    """The other ranks are gone; which one was first, and why."""


@dataclass
class _Progress:
    """How far a rank is. Times are of `time.monotonic()`."""

    joins: Future[None] = field(default_factory=Future)
    ready: Future[int] = field(default_factory=Future)
    answers: list[Future[str]] = field(default_factory=list)  # in the order of the questions
    num_done: int = 0
    num_calls: int = 0
    moved: float = 0.0  # when one of them last changed


class WorkerGroup:
    """Starts a process for each rank of `config.mesh` but the first. `config` is settled. Raises
    `OSError`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._timeout = config.distributed_timeout_seconds
        self._progress = {rank: _Progress() for rank in range(1, config.mesh.size)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._mesh: CollectiveMesh | None = None
        self._num_sent = 0  # messages that are to be done in order
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._failing = threading.Lock()
        self._asked = 0.0
        self.failure: str | None = None
        self._on_failure: Callable[[str], object] = lambda reason: None
        listener = socket.create_server((HOST, 0))
        self._address = listener.getsockname()[:2]
        self._store = open_store(config.mesh.size, listener)
        self._thread = PeerThread(self._start, self._received, self._lost, self._tick)

    # --- start -------------------------------------------------------------------------------

    def connect(self) -> Mesh:
        """The mesh, when all ranks are there. Raises `RankLostError`."""
        for progress in self._progress.values():
            progress.joins.result()
        device = torch.device(self._config.device)
        self._mesh = CollectiveMesh(self._config.mesh, self._store, HOST, device)
        return self._mesh

    def wait_ready(self, num_pages: int) -> None:
        """Until all ranks have loaded the model. Raises `RankLostError`, also for one that has
        another number of pages."""
        for rank, progress in self._progress.items():
            if (found := progress.ready.result()) != num_pages:
                self._fail(rank, f"it has {found} KV pages, rank 0 has {num_pages}")
                raise RankLostError(self.failure)
            progress.moved = time.monotonic()

    def on_failure(self, tell: Callable[[str], object]) -> None:
        """Call it once, in some thread, when a rank is lost, or now if one is."""
        self._on_failure = tell
        if self.failure is not None:
            tell(self.failure)

    # --- steps -------------------------------------------------------------------------------

    def send_step(self, step: PackedStep) -> None:
        """Raises `RankLostError`."""
        self.send(Kind.STEP, *step_content(step))

    def send_command(self, command: WorkerCommand) -> None:
        """Raises `RankLostError`."""
        match command:
            case ClearPages(page_ids):
                self.send(Kind.CLEAR_PAGES, page_ids)
            case CaptureGraph():
                self.send(Kind.CAPTURE_GRAPH)

    def send(self, kind: Kind, *content: Any) -> None:
        """Tell all ranks what is to be done next, in the order of the calls. Raises
        `RankLostError`."""
        if self.failure is not None:
            raise RankLostError(self.failure)
        with self._sending:
            now = time.monotonic()
            for progress in self._progress.values():
                if progress.num_done == self._num_sent:  # it was idle until now
                    progress.moved = now
            frame = encode(kind, self._num_sent, *content)
            self._num_sent += 1
            self._thread.send(frame)

    def ask(self, kind: Kind, *content: Any) -> list[Future[str]]:
        """Each rank's answer: an error's text, or "". Raises `RankLostError`."""
        futures: list[Future[str]] = [Future() for _ in self._progress]
        with self._asking:  # answers come in the order of the questions, whichever threads ask
            for progress, future in zip(self._progress.values(), futures, strict=True):
                progress.answers.append(future)
            self.send(kind, *content)
        return futures

    def check(self) -> None:
        """Block until all ranks have done what they were told. Raises `RankLostError` where they
        have not, or not the same as rank 0."""
        for future in self.ask(Kind.SYNC, self._num_calls):
            try:
                error = future.result(self._timeout)
            except TimeoutError:
                error = "a rank does not get to the end of its work"
            if error:
                self._fail(None, error)
                raise RankLostError(self.failure)

    @property
    def _num_calls(self) -> int:
        return 0 if self._mesh is None else self._mesh.num_common_calls

    # --- end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End all processes; returns when they have ended."""
        is_whole, self.failure = self.failure is None, self.failure or "the group is closed"
        self._thread.close()  # their connections: they end by that
        until = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()
        if self._mesh is not None and is_whole:
            self._mesh.close()

    # --- in the thread -----------------------------------------------------------------------

    def _start(self) -> list[socket.socket]:
        sockets = []
        for rank in self._progress:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", FOLLOWER, str(theirs.fileno())]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is rank 0's
                    env={**os.environ, **_environment(self._config, rank)},
                )
            self._processes.append(process)
            settings = encode_config(self._config), rank, self._address, str(torch.__version__)
            ours.sendall(encode(Kind.START, *settings, logger.getEffectiveLevel()))
            sockets.append(ours)
        return sockets

    def _received(self, rank: int, message: Message) -> None:
        progress = self._progress[rank]
        match message:
            case (Kind.PONG, int(done), int(calls)):
                if (done, calls) != (progress.num_done, progress.num_calls):
                    progress.num_done, progress.num_calls = done, calls
                    progress.moved = time.monotonic()
            case (Kind.DONE, str(error)) if progress.answers:
                progress.answers.pop(0).set_result(error)
            case (Kind.JOINS,) if not progress.joins.done():
                progress.joins.set_result(None)
            case (Kind.READY, int(num_pages)) if not progress.ready.done():
                progress.ready.set_result(num_pages)
            case (Kind.FAILED, str(error)):
                self._fail(rank, error)
            case _:
                self._fail(rank, f"it said {message!r:.100}")

    def _lost(self, rank: int, reason: str) -> None:
        if len(self._processes) >= rank:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._processes[rank - 1].wait(0.2)
                reason = f"its process ended with {code}"
        self._fail(rank, reason)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._asked < self._timeout / 8 or self.failure is not None:
            return
        self._asked = now
        self._thread.send(encode(Kind.PING))
        for peer in self._thread.peers:
            progress = self._progress[peer.rank]
            if not progress.ready.done():
                continue  # it loads: no answer is owed
            if now - peer.last_heard > self._timeout:
                self._fail(peer.rank, f"it has not answered for {self._timeout:g} s")
        waits = [
            rank
            for rank, each in self._progress.items()
            if each.ready.done() and each.num_done < self._num_sent
            and now - each.moved > self._timeout
        ]  # fmt: skip
        if waits and self.failure is None:
            slowest = min(waits, key=lambda rank: self._progress[rank].num_calls)
            self._fail(slowest, f"it gets no further with its work for {self._timeout:g} s")

    def _fail(self, rank: int | None, reason: str) -> None:
        with self._failing:
            if self.failure is not None:
                return
            who = "the ranks" if rank is None else f"rank {rank}"
            self.failure = f"{who} of {self._config.mesh.size} failed: {reason}"
        lost = RankLostError(self.failure)
        for progress in self._progress.values():
            futures: list[Future[Any]] = [progress.joins, progress.ready, *progress.answers]
            for future in futures:
                if not future.done():
                    future.set_exception(lost)
        for process in self._processes:
            process.kill()
        if self._mesh is not None:
            self._mesh.close()  # rank 0 may wait for it in a step
        self._on_failure(self.failure)


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
