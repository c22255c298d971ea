"""Responses in the background: made without the connection that asked for them.

    asked for    kept in the store, running; the client is told "queued"
    ended        completed, incomplete, failed or cancelled takes its place there

A streamed one writes into an `EventLog`, which any number of readers follow, each from where it
likes. All logs together are bounded: beyond `max_bytes` the oldest loses its events, though a
reader that follows it already gets what comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from asyncllm.server.http.errors import bad_request
from asyncllm.server.http.sse import FrameQueue, SSEStream

logger = logging.getLogger(__name__)

END = b"\n\n"  # of an event
EVENTS_PER_WRITE = 256


class EventLog:
    """One response's events, in place of an `SSEStream`; each has its place as its number."""

    def __init__(self, grow: Callable[[int], None]) -> None:
        """grow: is called with the bytes that come."""
        self.events: list[bytes] | None = []  # None: not kept any more
        self.num_bytes = 0
        self._grow = grow
        self._has_ended = False
        self._readers: set[SSEStream] = set()

    def push(self, frames: bytes) -> None:
        if self.events is not None:
            self.events += [event + END for event in frames.split(END)[:-1]]
            self.num_bytes += len(frames)
            self._grow(len(frames))
        for reader in self._readers:
            reader.push(frames)

    def end(self, frames: bytes) -> None:
        self.push(frames)
        self._has_ended = True
        for reader in self._readers:
            reader.end(b"")

    def forget(self) -> None:
        self.events, self.num_bytes = None, 0

    async def follow(self, http: web.Request, queue: FrameQueue, at: int) -> web.StreamResponse:
        """Send the events from number `at` on, to the end. Raises `ApiError`."""
        if self.events is None:
            raise bad_request("the events of this response are not kept any more", "stream")
        sse = SSEStream(http, queue)
        try:
            await sse.open()
            while self.events is not None and (events := self.events[at : at + EVENTS_PER_WRITE]):
                await sse.response.write(b"".join(events))
                at += len(events)
            if self.events is None:
                await sse.response.write_eof()  # what it lacks is gone
                return sse.response
            self._readers.add(sse)  # in the same turn: no event comes in between
            if self._has_ended:
                sse.end(b"")
            await sse.run()
        except ConnectionError:
            pass  # the client is gone, or was too slow: it may come again
        finally:
            self._readers.discard(sse)
        return sse.response


class Background:
    """The running ones, by their response's id, and the logs of those and of ended ones."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, EventLog] = {}  # oldest first

    def new_log(self, name: str) -> EventLog:
        log = self._logs[name] = EventLog(self._grow)
        return log

    def log_of(self, name: str) -> EventLog | None:
        return self._logs.get(name)

    def start(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await work()
            except asyncio.CancelledError:
                pass  # `work` has said so in the store
            except Exception:
                logger.exception("response %s in the background", name)

        task = self._tasks[name] = asyncio.create_task(guarded())
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def cancel(self, name: str) -> None:
        """Return once it has ended. Nothing to do for one that has."""
        if (task := self._tasks.get(name)) is not None:
            await asyncio.sleep(0)  # one that has not begun would not end its requests
            task.cancel()
            await asyncio.wait([task])

    def forget(self, name: str) -> None:
        if (log := self._logs.pop(name, None)) is not None:
            self._num_bytes -= log.num_bytes
            log.forget()

    async def close(self, _: Any = None) -> None:
        for name in list(self._tasks):
            await self.cancel(name)

    def _grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._logs)))
