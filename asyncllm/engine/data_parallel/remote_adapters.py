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
    """Implements `Adapters`. While the engine is down, what is asked is only noted, and done by
    `restore`."""

    def __init__(self, send: Callable[[wire.Message], None]) -> None:
        self._tell = send
        self._is_up = False  # between `restore` and `lost`
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._requests: dict[str, LoRARequest] = {}
        self._pinned: set[str] = set()
        self.running: list[str] = []
        self.waiting: list[str] = []

    async def add(self, request: LoRARequest, *, reload: bool = False) -> None:
        """Raises `LoRALoadError`, and then nothing has changed."""
        if self._is_up:
            await self._ask(request, reload=reload)
        self._requests[request.lora_name] = request

    async def _ask(self, request: LoRARequest, *, reload: bool) -> None:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._tell(wire.AddAdapter(number, wire.Adapter.of(request), reload))
            await answer
        finally:
            del self._waiting[number]

    def _send(self, message: wire.Message) -> None:
        if self._is_up:
            self._tell(message)

    def done(self, number: int, error: wire.Error | None) -> None:
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error.error)

    def lost(self) -> None:
        """The engine is down: what it has not answered is noted as well."""
        self._is_up = False
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)
        self.running, self.waiting = [], []

    async def restore(self) -> None:
        """In a process that was started. Forgets those whose files are no longer there."""
        self._is_up = True
        for request in self.requests:
            if self.find(request.lora_name) != request:  # removed or replaced meanwhile
                continue
            try:
                await self._ask(request, reload=False)
            except LoRALoadError as error:  # of one adapter: the engine serves without it
                logger.error("adapter %s is not loaded again: %s", request.lora_name, error)
                self.remove(request.lora_name)
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
