"""Server-sent events at a few microseconds each: the one place that knows how aiohttp writes.

A frame goes straight to the transport as one HTTP chunk, without a task switch. Everything else is
aiohttp's public API: `StreamResponse.prepare` for the headers, `write` for what had to wait,
`write_eof` for the end. That is sound only while aiohttp's own writer holds nothing back and adds
nothing (headers already sent, chunked, no compression, no length): `_writes_plain_chunks` checks
it on every stream, an error is logged once if it ever fails, and `push` then takes the public way.
Tested with aiohttp 3.13 and 3.14.

A slow reader is bounded twice. While more than COALESCE_ABOVE_BYTES sit in the transport, frames
collect here and go out as one merged write when it drains. Above MAX_PENDING_BYTES in all, the
client is dropped.

`push` and `end` are called by the engine between two steps: they never await, block or raise.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.http_writer import StreamWriter

logger = logging.getLogger(__name__)

COALESCE_ABOVE_BYTES = 64 * 1024
MAX_PENDING_BYTES = 1024 * 1024

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx: do not collect the stream
}


class SSEStream:
    """One response. Frames pushed before `open` wait for it."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._transport: asyncio.Transport | None = None  # set while frames may bypass aiohttp
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._ended = False
        self._dropped = False
        self.too_slow = False  # why it was dropped
        self._wake = asyncio.Event()

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
    def direct(self) -> bool:
        """Frames go straight to the transport."""
        return self._transport is not None

    def push(self, frames: bytes) -> None:
        """Send whole frames, now or as soon as the client has read enough."""
        if not frames:
            return  # an empty chunk would end the body
        transport = self._transport
        if (
            transport is None
            or self._pending
            or transport.is_closing()
            or transport.get_write_buffer_size() > COALESCE_ABOVE_BYTES
        ):
            self._hold_back(frames)
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(frames), frames))

    def end(self, frames: bytes) -> None:
        """Send the last frames; `run` returns once all is written."""
        self._ended = True
        self._wake.set()
        self.push(frames)

    async def run(self) -> None:
        """Write what `push` held back, to the end. Raises `ConnectionError` for a lost client."""
        while not self._ended or self._pending:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                await self._write_pending()
        await self.response.write_eof()

    async def _write_pending(self) -> None:
        await self._request.writer.drain()  # returns when the transport is below its low mark
        if self._dropped:
            raise ConnectionResetError("the client was dropped")
        merged = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        await self.response.write(merged)

    def _hold_back(self, frames: bytes) -> None:
        self._wake.set()
        if self._dropped:
            return
        self._pending.append(frames)
        self._pending_bytes += len(frames)
        transport = self._request.transport
        if transport is None or transport.is_closing():
            self._dropped = True
        elif self._pending_bytes + transport.get_write_buffer_size() > MAX_PENDING_BYTES:
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
        )
    except AttributeError:
        plain = False
    if not plain:
        _complain_once()
    return plain


_complained = False


def _complain_once() -> None:
    global _complained
    if not _complained:
        _complained = True
        logger.error("this aiohttp does not write as expected: streams take the slow, public way")
