"""LoRA adapters of an engine in another process: those it knows, and what it answered."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from asyncllm.engine.data_parallel import wire
from asyncllm.errors import LoRALoadError
from asyncllm.lora import LoRARequest

logger = logging.getLogger("asyncllm")


class RemoteAdapters:
    """Implements `Adapters`."""

    def __init__(self, send: Callable[[wire.Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._requests: dict[str, LoRARequest] = {}
        self._pinned: set[str] = set()
        self.running: list[str] = []
        self.waiting: list[str] = []

    async def add(self, request: LoRARequest, *, reload: bool = False) -> None:
        """Raises `LoRALoadError`, and then nothing has changed."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(wire.AddAdapter(number, wire.Adapter.of(request), reload))
        try:
            await answer
        finally:
            del self._waiting[number]
        self._requests[request.lora_name] = request

    def done(self, number: int, error: wire.Error | None) -> None:
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error.error)

    def lost(self, why: str) -> None:
        """The engine's process has ended: nobody answers."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(LoRALoadError(why))
        self.running, self.waiting = [], []

    async def restore(self) -> None:
        """In a process that was started again. Forgets those whose files are no longer there."""
        for request in self.requests:
            try:
                await self.add(request)
            except LoRALoadError as error:  # of one adapter: the engine serves without it
                logger.error("adapter %s is not loaded again: %s", request.lora_name, error)
                del self._requests[request.lora_name]
                self._pinned.discard(request.lora_name)
        for name in self._pinned:
            self._send(wire.PinAdapter(name))

    def remove(self, name: str) -> bool:
        self._pinned.discard(name)
        self._send(wire.RemoveAdapter(name))
        return self._requests.pop(name, None) is not None

    def pin(self, name: str) -> None:
        if name not in self._requests:
            raise LoRALoadError(f"the adapter {name!r} is not loaded")
        self._pinned.add(name)
        self._send(wire.PinAdapter(name))

    def find(self, name: str) -> LoRARequest | None:
        return self._requests.get(name)

    @property
    def requests(self) -> list[LoRARequest]:
        return list(self._requests.values())
