"""The socket between the server's process and an engine's, as either end has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from asyncllm.engine.data_parallel.wire import Message
from asyncllm.frames import Frames, frame


class Connection(asyncio.Protocol):
    """One end of a socket: `received` gets each message, `lost` why there will be no more."""

    def __init__(
        self, types: Any, received: Callable[[Any], None], lost: Callable[[str], None]
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[types])
        self._encoder = msgspec.msgpack.Encoder()
        self._received = received
        self._lost = lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[msgspec.Raw] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                for message in self._decoder.decode(body):
                    self._received(message)
        except (msgspec.MsgspecError, ValueError) as error:
            self._end(f"it sent what is no message: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._end("its connection is closed" if error is None else str(error))

    def send(self, message: Message) -> None:
        """With all others of this turn of the loop, in one frame. Without effect after the end.
        Raises for what cannot be encoded, and sends the others."""
        encoded = msgspec.Raw(self._encoder.encode(message))
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append(encoded)

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(frame(self._encoder.encode(unsent)))

    def close(self) -> None:
        """Close after what was sent before. `lost` is not called."""
        self.flush()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _end(self, why: str) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._lost(why)
