"""Server-sent events at a few microseconds each: the one place that knows how aiohttp writes.

A step's frames go straight to the transport as one HTTP chunk, without a task switch; with the last
one goes the end of the body, and aiohttp's writer is marked as ended. Everything else is aiohttp's
public API: `StreamResponse.prepare` for the headers, `write` for what had to wait, `write_eof` for
the end after that. That is sound only while aiohttp's own writer holds nothing back and adds
nothing (headers already sent, chunked, no compression, no length): `_writes_plain_chunks` checks it
on every stream, an error is logged once if it ever fails, and frames then go through the public
calls. Tested with aiohttp 3.13 and 3.14.

`push` and `end` are called by the engine between two steps: they never await, block or raise. They
only store frames; `FrameQueue` writes them in the loop's next turns, all streams together (the
kernel's send path stays in the caches), in slices: between two of them the engine may launch its
next step and other tasks run; so are handlers woken whose streams have ended, 256 of which may end
in one step. Where the device is faster than the host, a stream's frames of two steps become one
write, of more never.

A slow reader is bounded twice. While more than COALESCE_ABOVE_BYTES sit in the transport, frames
collect here and go out as one merged write when it drains. Above MAX_PENDING_BYTES in all, the
client is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from aiohttp import web
from aiohttp.http_writer import StreamWriter

logger = logging.getLogger(__name__)

COALESCE_ABOVE_BYTES = 64 * 1024
MAX_PENDING_BYTES = 1024 * 1024
STREAMS_PER_SLICE = 64  # at 3 us a write no turn of the loop is longer than about 200 us
ENDS_PER_TURN = 8  # a handler takes 0.1 ms to leave

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx: do not collect the stream
}


class FrameQueue:
    """The streams with frames to write, and those that have ended; one for all of a loop."""

    def __init__(self) -> None:
        self._streams: deque[SSEStream] = deque()
        self._is_scheduled = False
        self._ended: deque[SSEStream] = deque()

    def add(self, stream: SSEStream) -> None:
        self._streams.append(stream)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._write_slice)

    def _write_slice(self) -> None:
        streams, num_written = self._streams, 0
        try:
            while streams and (num_written < STREAMS_PER_SLICE or streams[0].is_late):
                streams.popleft().write_frames()
                num_written += 1
        finally:  # whatever befell one stream, the others are written
            self._is_scheduled = bool(streams)
            if streams:
                asyncio.get_running_loop().call_soon(self._write_slice)

    def add_ended(self, stream: SSEStream) -> None:
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._wake_ended)
        self._ended.append(stream)

    def _wake_ended(self) -> None:
        for _ in range(min(ENDS_PER_TURN, len(self._ended))):
            self._ended.popleft().wake()
        if self._ended:
            asyncio.get_running_loop().call_soon(self._wake_ended)


class SSEStream:
    """One response. Frames pushed before `open` wait for it."""

    __slots__ = (
        "_dropped",
        "_ended",
        "_is_queued",
        "_pending",
        "_queue",
        "_request",
        "_response",
        "_transport",
        "_wake",
        "too_slow",
    )

    def __init__(self, request: web.Request, queue: FrameQueue | None = None) -> None:
        self._request = request
        self._queue = queue or FrameQueue()
        self._transport: asyncio.Transport | None = None  # set while frames may bypass aiohttp
        self._pending: list[bytes] = []
        self._is_queued = False
        self._ended = False
        self._dropped = False
        self.too_slow = False  # why it was dropped
        self._wake = asyncio.Event()  # there is something to do for `run`
        self._response: web.StreamResponse | None = None

    @property
    def response(self) -> web.StreamResponse:
        """Made at the first access: not before the engine has the request."""
        if self._response is None:
            self._response = web.StreamResponse(headers=_HEADERS)
        return self._response

    async def open(self) -> None:
        """Send status 200 and the headers."""
        writer = await self.response.prepare(self._request)
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.set_write_buffer_limits(high=COALESCE_ABOVE_BYTES)
        if _writes_plain_chunks(writer, self._request):
            self._transport = transport

    @property
    def is_late(self) -> bool:
        """Frames of two steps are pending: the loop has more to do than the device."""
        return len(self._pending) > 1

    def push(self, frames: bytes) -> None:
        """Send whole frames, soon or as soon as the client has read enough."""
        if self._dropped or not frames:
            return
        self._pending.append(frames)
        if not self._is_queued:
            self._is_queued = True
            self._queue.add(self)

    def end(self, frames: bytes) -> None:
        """Send the last frames; `run` returns once all is written."""
        self._ended = True
        try:
            self.push(frames)
        finally:
            if not self._is_queued:  # there is nothing to write, or no reader
                self._wake.set()

    def write_frames(self) -> None:
        """For the queue: one write of all that waits, or leave it to `run`."""
        self._is_queued = False
        if not self._pending:  # `run` has written it
            if self._ended:
                self._wake.set()
            return
        transport = self._transport
        if (
            transport is None
            or transport.is_closing()
            or transport.get_write_buffer_size() > COALESCE_ABOVE_BYTES
        ):
            self._wake.set()
            self._bound_pending()
            return
        body = self._take_pending()
        if not self._ended:
            transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        self._request.writer._eof = True  # type: ignore[attr-defined]
        self._queue.add_ended(self)

    def wake(self) -> None:
        """Let `run` look what there is to do."""
        self._wake.set()

    async def run(self) -> None:
        """Write what had to wait, to the end. Raises `ConnectionError` for a lost client."""
        while not self._ended or self._pending:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                await self._write_pending()
        if self._dropped:
            raise ConnectionResetError("the client was dropped")
        await self.response.write_eof()

    async def _write_pending(self) -> None:
        await self._request.writer.drain()  # returns when the transport is below its low mark
        if self._dropped:
            raise ConnectionResetError("the client was dropped")
        if self._pending:  # else the queue was faster
            await self.response.write(self._take_pending())

    def _take_pending(self) -> bytes:
        body = b"".join(self._pending)  # of one alone it is that one, not a copy
        self._pending.clear()
        return body

    def _bound_pending(self) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            self._dropped = True
            return
        num_pending = sum(map(len, self._pending))
        if num_pending + transport.get_write_buffer_size() > MAX_PENDING_BYTES:
            self._dropped = self.too_slow = True
            logger.warning("dropped a client with over %d bytes unread", MAX_PENDING_BYTES)
            transport.abort()  # connection_lost then cancels the handler


def _writes_plain_chunks(writer: object, request: web.Request) -> bool:
    """Whether bytes framed by hand are what aiohttp would send next on this connection."""
    if request.version < (1, 1):
        return False  # HTTP/1.0 has no chunks
    try:
        plain = (
            type(writer) is StreamWriter
            and writer is request.writer
            and writer.transport is request.transport
            and writer.chunked
            and writer.length is None
            and writer._headers_written
            and writer._headers_buf is None
            and writer._compress is None
            and writer._on_chunk_sent is None
            and not writer._eof
        )
    except AttributeError:
        plain = False
    if not plain:
        _log_once()
    return plain


_has_logged = False


def _log_once() -> None:
    global _has_logged
    if not _has_logged:
        _has_logged = True
        logger.error("this aiohttp does not write as expected: streams take the slow, public calls")
