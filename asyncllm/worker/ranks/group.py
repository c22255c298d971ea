"""Rank 0's side of the other ranks: it starts them, tells them each step, and notices who is lost.

    event loop        send: in the order of rank 0's own launches
    asyncllm-ranks    the sockets; starts the ranks; asks each rank now and then how far it is

A rank is lost when its process or its connection ends, when it says that it failed, when it does
not answer, or when it has work and gets no further, each for `distributed_timeout_seconds`. One
that is lost takes the group with it: the others are killed, which ends rank 0's own waiting for
them with an error, and `failure` says which rank it was and why.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncllm.config import EngineConfig
from asyncllm.mesh_config import RankStats
from asyncllm.models.parallel.collectives import CollectiveMesh
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.models.parallel.stores import EngineStore, open_store
from asyncllm.worker.kernels import make_mesh
from asyncllm.worker.ranks.connection import PeerThread
from asyncllm.worker.ranks.handshake import read_secret
from asyncllm.worker.ranks.joining import JoinedRanks, listen
from asyncllm.worker.ranks.messages import (
    Kind,
    Message,
    encode,
    encode_config,
)
from asyncllm.worker.ranks.processes import ChildRanks, Ranks

logger = logging.getLogger("asyncllm")

QUESTIONS = 8  # to each rank in `distributed_timeout_seconds`: how far it is


class RankLostError(RuntimeError):
    """The other ranks are gone; which one was first, and why."""


@dataclass
class _Progress:
    """How far a rank is. Times are of `time.monotonic()`."""

    joins: Future[None] = field(default_factory=Future)
    ready: Future[int] = field(default_factory=Future)
    answers: dict[int, Future[str]] = field(default_factory=dict)  # by the message's place
    num_done: int = 0
    num_calls: int = 0
    moved: float = 0.0  # when one of them last changed


class WorkerGroup:
    """Starts each rank of `config.mesh` but the first, or waits until it has joined, as long as it
    is not `is_cancelled`. `config` is settled. Raises `OSError`, `ValueError`, `ModelLoadError`."""

    def __init__(
        self,
        config: EngineConfig,
        is_cancelled: Callable[[], bool] = lambda: False,
        engines: EngineStore | None = None,
    ) -> None:
        """engines: of those that share experts."""
        self._config, self._engines = config, engines
        self._timeout = config.distributed_timeout_seconds
        self._progress = {rank: _Progress() for rank in range(1, config.mesh.size)}
        self._ranks = find_ranks(config, is_cancelled)
        self._mesh: CollectiveMesh | None = None
        self._num_sent = 0  # messages that are to be done in order
        self._lock = threading.RLock()  # `_send` may find that a rank is lost
        self._asked = 0.0
        self.failure: str | None = None
        self._lost_rank: int | None = None
        self._on_failure: Callable[[str], object] = lambda reason: None
        self._host = self._ranks[0].host
        listener = listen(self._host, 0)
        self._address = listener.getsockname()[:2]
        self._store = open_store(config.mesh.size, listener)
        self._thread = PeerThread(self._start, self._received, self._lost, self._tick)

    # --- start -------------------------------------------------------------------------------

    def connect(self) -> Mesh:
        """The mesh, when all ranks are there. Raises `RankLostError`."""
        for progress in self._progress.values():
            progress.joins.result()
        self._mesh = make_mesh(self._config, self._store, self._host, self._engines)
        return self._mesh

    def wait_ready(self, num_pages: int) -> None:
        """Until all ranks have loaded the model. Raises `RankLostError`, also for one that has
        another number of pages."""
        for rank, progress in self._progress.items():
            if (found := progress.ready.result()) != num_pages:
                self._fail(rank, f"it has {found} KV pages, rank 0 has {num_pages}")
                raise RankLostError(self.failure)
            progress.moved = time.monotonic()
        if self._mesh is not None and self._config.device == "cpu":
            self._mesh.limit(2 * self._timeout)  # whoever is late is lost by then

    def on_failure(self, tell: Callable[[str], object]) -> None:
        """Call it once, in some thread, when a rank is lost, or now if one is."""
        self._on_failure = tell
        if self.failure is not None:
            tell(self.failure)

    def stats(self) -> list[RankStats]:
        """Report the ranks beyond the first. For any thread."""
        now, every = time.monotonic(), self._timeout / QUESTIONS
        late = self._late(now)
        slowest = min((self._progress[rank].num_calls for rank in late), default=0)
        lags = {
            rank: waited - every
            for rank, waited in late.items()
            if self._progress[rank].num_calls == slowest  # the others wait for it
        }
        for peer in self._thread.peers:
            if self._progress[peer.rank].ready.done():
                silent = now - peer.last_heard - every
                lags[peer.rank] = max(silent, lags.get(peer.rank, 0.0))
        return [
            RankStats(rank, rank != self._lost_rank, max(lags.get(rank, 0.0), 0.0))
            for rank in self._progress
        ]

    # --- steps -------------------------------------------------------------------------------

    def send(self, kind: Kind, *content: Any) -> None:
        """Tell all ranks what is to be done next, in the order of the calls. Raises
        `RankLostError`."""
        self._send(kind, content, {})

    def _send(self, kind: Kind, content: Message, answers: Mapping[int, Future[str]]) -> None:
        """answers: what ranks will answer."""
        with self._lock:
            if self.failure is not None:  # who would answer?
                raise RankLostError(self.failure)
            now = time.monotonic()
            for rank, progress in self._progress.items():
                if progress.num_done == self._num_sent:  # it was idle until now
                    progress.moved = now
                if rank in answers:
                    progress.answers[self._num_sent] = answers[rank]
            frame = encode(kind, self._num_sent, *content)
            self._num_sent += 1
            self._thread.send(frame)

    def ask(self, kind: Kind, *content: Any) -> list[Future[str]]:
        """Each rank's answer: an error's text, or "". Raises `RankLostError`."""
        answers: dict[int, Future[str]] = {rank: Future() for rank in self._progress}
        self._send(kind, content, answers)
        return list(answers.values())

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
        """End all ranks; returns when those of this host have ended. Who waits for their answers
        gets a `RankLostError`."""
        with self._lock:  # nothing is asked for any more
            is_whole, self.failure = self.failure is None, self.failure or "the group is closed"
        self._thread.close()  # their connections: they end by that
        for ranks in self._ranks:
            ranks.close()
        self._end_answers(self.failure)
        if self._mesh is not None:
            if is_whole:
                self._mesh.close()
            self._mesh.wait_closed()

    # --- in the thread -----------------------------------------------------------------------

    def _start(self) -> list[socket.socket]:
        sockets: dict[int, socket.socket] = {}
        try:
            for ranks in self._ranks:
                sockets |= ranks.start()
            settings, version = encode_config(self._config), str(torch.__version__)
            level = logger.getEffectiveLevel()
            engines = None if self._engines is None else self._engines.address
            for rank, ours in sockets.items():
                addresses = self._address, engines
                ours.sendall(encode(Kind.START, settings, rank, addresses, version, level))
        except BaseException:
            for ours in sockets.values():
                ours.close()
            for ranks in self._ranks:
                ranks.close()
            raise
        return [sockets[rank] for rank in sorted(sockets)]

    def _received(self, rank: int, message: Message) -> None:
        progress = self._progress[rank]
        match message:
            case (Kind.PONG, int(done), int(calls)):
                if (done, calls) != (progress.num_done, progress.num_calls):
                    progress.num_done, progress.num_calls = done, calls
                    progress.moved = time.monotonic()
            case (Kind.DONE, int(place), str(error)) if place in progress.answers:
                progress.answers.pop(place).set_result(error)
            case (Kind.JOINS,) if not progress.joins.done():
                progress.joins.set_result(None)
            case (Kind.READY, int(num_pages)) if not progress.ready.done():
                progress.ready.set_result(num_pages)
            case (Kind.FAILED, str(error)):
                self._fail(rank, error)
            case _:
                self._fail(rank, f"it said {message!r:.100}")

    def _lost(self, rank: int, reason: str) -> None:
        known = (ranks.why_lost(rank) for ranks in self._ranks if rank in ranks.numbers)
        self._fail(rank, next(known, None) or reason)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._asked < self._timeout / QUESTIONS or self.failure is not None:
            return
        self._asked = now
        self._thread.send(encode(Kind.PING))
        for peer in self._thread.peers:
            progress = self._progress[peer.rank]
            if not progress.ready.done():
                continue  # it loads: no answer is owed
            if now - peer.last_heard > self._timeout:
                self._fail(peer.rank, f"it has not answered for {self._timeout:g} s")
        waits = [rank for rank, waited in self._late(now).items() if waited > self._timeout]
        if waits and self.failure is None:
            slowest = min(waits, key=lambda rank: self._progress[rank].num_calls)
            self._fail(slowest, f"it gets no further with its work for {self._timeout:g} s")

    def _late(self, now: float) -> dict[int, float]:
        """The ranks with work, and for how long each has got no further."""
        return {
            rank: now - each.moved
            for rank, each in self._progress.items()
            if each.ready.done() and each.num_done < self._num_sent
        }

    def _fail(self, rank: int | None, reason: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            who = "the ranks" if rank is None else f"rank {rank}"
            self._lost_rank = rank
            self.failure = f"{who} of {self._config.mesh.size} failed: {reason}"
        self._end_answers(self.failure)
        for ranks in self._ranks:
            ranks.kill()
        if self._mesh is not None:
            self._mesh.close()  # rank 0 may wait for it in a step
        self._on_failure(self.failure)

    def _end_answers(self, reason: str) -> None:
        lost = RankLostError(reason)
        for progress in self._progress.values():
            futures: list[Future[Any]] = [
                progress.joins,
                progress.ready,
                *progress.answers.values(),
            ]
            for future in futures:
                if not future.done():
                    future.set_exception(lost)


def find_ranks(config: EngineConfig, is_cancelled: Callable[[], bool]) -> list[Ranks]:
    """Who has the ranks beyond the first; those that join come first. Raises as `WorkerGroup`."""
    mesh, cluster = config.mesh, config.cluster
    if cluster.backend == "ray":
        from asyncllm.worker.ranks.ray_ranks import RayRanks  # an extra's library is behind it

        return [RayRanks(config, range(1, mesh.size), cluster.address, is_cancelled)]
    host, num_own = cluster.address or "127.0.0.1", mesh.size // cluster.nnodes
    found: list[Ranks] = []
    if num_own < mesh.size:
        secret, numbers = read_secret(cluster.secret_file), range(num_own, mesh.size)
        found.append(JoinedRanks((host, cluster.port), secret, numbers, is_cancelled))
    return [*found, ChildRanks(config, range(1, num_own), host)]
