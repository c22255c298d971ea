"""Ranks of other hosts: rank 0 listens until all have joined that it waits for.

Anyone who reaches the address may speak first. Who does not prove in time that he knows the secret
is sent away, so many at once, and keeps nobody else from joining.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence

from asyncllm.errors import ModelLoadError
from asyncllm.worker.ranks.handshake import HandshakeError, admit

logger = logging.getLogger("asyncllm")

JOIN_SECONDS = 600.0
SAY_SECONDS = 30.0
CHECK_SECONDS = 0.1
MAX_HANDSHAKES = 32  # at once: more connections are closed


class JoinedRanks:
    """Implements `Ranks`. Listens from its making on."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        numbers: Sequence[int],
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Raises `OSError`."""
        self._listener = listen(*address)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._secret = secret
        self.numbers = numbers
        self.host = self.address[0]
        self._is_cancelled = is_cancelled
        self._names: dict[int, str] = {}  # of ranks that have joined, or are about to
        self._joined: dict[int, socket.socket] = {}
        self._handshakes: set[asyncio.Task[None]] = set()

    def start(self) -> dict[int, socket.socket]:
        """Raises `ModelLoadError` where some do not join."""
        with self._listener:
            try:
                asyncio.run(self._wait())
            except BaseException:
                self.kill()
                raise
        for connected in self._joined.values():
            connected.setblocking(True)
        return self._joined

    def why_lost(self, rank: int) -> str | None:
        return f"its connection from {self._names[rank]} is closed"

    def kill(self) -> None:
        """Each ends with its connection."""
        for connected in self._joined.values():
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """They are not this host's processes; nor does it wait for more."""
        self._listener.close()

    # --- the loop of `start` -----------------------------------------------------------------

    async def _wait(self) -> None:
        accepting = asyncio.create_task(self._accept())
        start, said = time.monotonic(), 0.0
        while self.missing:
            now = time.monotonic()
            missing = ", ".join(map(str, self.missing))
            if self._is_cancelled():
                raise ModelLoadError("the start is cancelled")
            if now - start > JOIN_SECONDS:
                raise ModelLoadError(f"ranks {missing} have not joined for {JOIN_SECONDS:g} s")
            if now - said > SAY_SECONDS:
                said = now
                logger.info("waiting at %s:%d for ranks %s", *self.address, missing)
            if accepting.done():
                accepting.result()
            await asyncio.sleep(CHECK_SECONDS)
            self._drop_those_gone()
        accepting.cancel()

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.numbers if rank not in self._joined]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connected, (host, port, *_) = await loop.sock_accept(self._listener)
            if len(self._handshakes) >= MAX_HANDSHAKES:
                connected.close()
                continue
            task = asyncio.create_task(self._admit(connected, f"{host}:{port}"))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _admit(self, connected: socket.socket, name: str) -> None:
        chosen: list[int] = []

        def choose(asked: int | None) -> int:
            chosen.append(self._choose(asked, name))
            return chosen[0]

        try:
            rank = await admit(connected, self._secret, choose)
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            logger.warning("%s does not join: %s", name, str(error) or "it takes too long")
            for rank in chosen:
                del self._names[rank]
            connected.close()
            return
        self._joined[rank] = connected
        logger.info("rank %d has joined from %s", rank, name)

    def _choose(self, asked: int | None, name: str) -> int:
        free = [rank for rank in self.numbers if rank not in self._names]
        if asked is None and free:
            asked = free[0]
        if asked is None:
            raise HandshakeError("all ranks have joined")
        if asked in self._names:
            raise HandshakeError(f"rank {asked} has joined from {self._names[asked]}")
        if asked not in free:
            raise HandshakeError(f"rank {asked} is none of those that join, which are {free}")
        self._names[asked] = name
        return asked

    def _drop_those_gone(self) -> None:
        """While others are waited for: a rank's place is free again."""
        for rank, connected in [*self._joined.items()]:
            try:
                connected.recv(1, socket.MSG_PEEK)  # nothing is due from it
            except BlockingIOError:
                continue
            except ConnectionError as error:
                logger.debug("rank %d: %s", rank, error)
            logger.warning("rank %d is gone: %s", rank, self._names.pop(rank))
            self._joined.pop(rank).close()


def listen(host: str, port: int) -> socket.socket:
    """At this address alone. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
