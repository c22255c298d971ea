"""One adapter between its name and its slot, and who waits for such a slot. The loop's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncllm.errors import EngineDeadError
from asyncllm.lora import LoRARequest
from asyncllm.types import NO_ADAPTER


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter's files, as they were when they were read."""

    request: LoRARequest
    place: int  # in host memory
    content: bytes  # equal for equal files only: part of the prefix cache's key
    rank: int
    slot: int = NO_ADAPTER
    num_users: int = 0  # requests, queued or running
    pinned: bool = False
    copying: asyncio.Task[None] | None = None  # to its slot

    @property
    def is_copied(self) -> bool:
        """Its place is being read and its slot written."""
        return self.copying is not None and not self.copying.done()


@dataclass(slots=True)
class Registered:
    request: LoRARequest
    adapter: Adapter | None = None  # what its files were; None: to be read
    reading: asyncio.Task[Adapter] | None = None  # by a thread, which nobody can stop
    num_readers: int = 0  # who wait for that, or have not run since
    is_listed: bool = False  # it has had its name


class Room:
    """Places and slots, which others give back: whoever finds none waits, first come, first served.

    What is given back may be what somebody else waits for, so all look again, in their order.
    """

    def __init__(self) -> None:
        self._given_back = asyncio.Event()
        self._is_closed = False

    async def wait(self) -> None:
        """Until something was given back. Raises `EngineDeadError` where nothing will be."""
        if not self._is_closed:
            await self._given_back.wait()
        if self._is_closed:
            raise EngineDeadError("the engine is closed")

    def wake(self) -> None:
        self._given_back.set()
        self._given_back.clear()

    def close(self) -> None:
        """Whoever waits, or will, hears that the engine is closed."""
        self._is_closed = True
        self.wake()
