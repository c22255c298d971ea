"""A process of an engine and the socket to it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from asyncllm.child_process import start_child
from asyncllm.engine.data_parallel import wire
from asyncllm.engine.data_parallel.connection import Connection
from asyncllm.host import in_own_thread

MODULE = "asyncllm.engine.data_parallel.process"
END_SECONDS = 0.5  # for one whose connection has ended, before it is killed
EXIT_SECONDS = 5.0  # to end by itself, once it is told to


class EngineProcess:
    """`lost` has a result when nothing will come from it any more: why."""

    def __init__(
        self, environment: Mapping[str, str], received: Callable[[wire.FromEngine], None]
    ) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.last_heard = time.monotonic()
        self._environment = environment
        self._received = received
        self.connection = Connection(wire.FromEngine, self._hear, self.lose)
        self._process: subprocess.Popen[bytes] | None = None

    async def connect(self, others: Sequence[socket.socket] = ()) -> None:
        """Start it, in this thread: it ends with the thread that started it. others: that it is
        given, too. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = start_child(MODULE, self._environment, theirs, *others)
            except BaseException:
                ours.close()
                raise
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.connection, sock=ours)

    def _hear(self, message: wire.FromEngine) -> None:
        self.last_heard = time.monotonic()
        self._received(message)

    def lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    async def kill(self) -> str:
        """End it, at once unless its connection has ended already. How it ended."""
        self.connection.close()
        if self._process is None:
            return "it was not started"
        try:
            if self.lost.done():  # it may be ending by itself, and its exit code says why
                with suppress(subprocess.TimeoutExpired):
                    await in_own_thread(self._process.wait, END_SECONDS)
        finally:
            self._process.kill()
        code = await in_own_thread(self._process.wait)
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def end(self) -> None:
        """It was told to end."""
        self.connection.flush()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                await in_own_thread(self._process.wait, EXIT_SECONDS)
        await self.kill()
