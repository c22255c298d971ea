"""Length-prefixed frames of a byte stream."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

LENGTH = Struct("<I")
MAX_FRAME_BYTES = 1 << 28


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


class Frames:
    """Buffers received bytes until frames are complete."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Bodies of the frames that are complete now. Raises `ValueError` for a frame longer than
        MAX_FRAME_BYTES."""
        self._bytes += received
        while len(self._bytes) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._bytes)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {size} bytes is over {MAX_FRAME_BYTES}")
            end = LENGTH.size + size
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield body
