"""An engine's connections to the other engines that it shares experts with.

They agree on each step over these (lockstep.py). As each engine computes its own experts for the
rows of all engines, it needs the expert part of every adapter that one of them uses: an engine that
loads an adapter into a slot has the others load its experts, before a request may use it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from socket import socket

from asyncllm.engine.data_parallel.connection import Connection
from asyncllm.engine.data_parallel.lockstep import Lockstep, Said
from asyncllm.engine.data_parallel.wire import Message
from asyncllm.errors import LoRALoadError
from asyncllm.models.lora_adapter import AdapterInfo
from asyncllm.worker.adapters import AdapterStore


class LoadExperts(Message):
    """Load an adapter's experts into this slot of the sending engine. Answered by `Loaded`."""

    number: int
    folder: str
    slot: int


class Loaded(Message):
    number: int
    error: str | None


class Peers:
    """store: this engine's adapters; None: it serves none."""

    def __init__(self, engine: int, others: Mapping[int, socket], store: AdapterStore | None):
        self._sockets, self._store = others, store
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count()
        self._answers: dict[tuple[int, int], asyncio.Future[None]] = {}  # by engine and number
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: str | None = None  # why not all others answer any more
        self.lockstep = Lockstep(engine, others, self._tell)

    async def connect(self) -> None:
        """Does not wait: the others may still be loading."""
        loop = asyncio.get_running_loop()
        for engine, each in self._sockets.items():
            heard, lost = partial(self._heard, engine), partial(self._lost, engine)
            made = Connection(Said | LoadExperts | Loaded, heard, lost)
            self._connections[engine] = made
            await loop.create_unix_connection(lambda made=made: made, sock=each)  # type: ignore[misc]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._end = "the engine is closed"
        for engine, number in list(self._answers):
            self._answer(engine, number, self._end)

    def _tell(self, message: Message) -> None:
        for connection in self._connections.values():
            connection.send(message)
            connection.flush()

    def _heard(self, engine: int, message: Said | LoadExperts | Loaded) -> None:
        match message:
            case Said():
                self.lockstep.hear(engine, message)
            case LoadExperts():
                task = asyncio.create_task(self._load(engine, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Loaded(number, error):
                self._answer(engine, number, error)

    def _lost(self, engine: int, why: str) -> None:
        self.lockstep.lose(engine, why)
        self._end = self.lockstep.lost
        for other, number in list(self._answers):
            if other == engine:
                self._answer(engine, number, why)

    # --- adapters ----------------------------------------------------------------------------

    async def load_experts(self, folder: Path, slot: int) -> None:
        """Have all other engines load an adapter's experts. Raises `LoRALoadError`, when they have
        all answered: none of them writes to the slot any more."""
        if self._end is not None:
            raise LoRALoadError(self._end)
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answers = {(engine, number): loop.create_future() for engine in self._connections}
        self._answers |= answers
        self._tell(LoadExperts(number, str(folder), slot))
        await asyncio.wait(answers.values())
        for answer in answers.values():
            answer.result()

    def _answer(self, engine: int, number: int, error: str | None) -> None:
        answer = self._answers.pop((engine, number))
        if answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(LoRALoadError(f"engine {engine}: {error}"))

    async def _load(self, engine: int, asked: LoadExperts) -> None:
        error = None
        try:
            assert self._store is not None, "this engine serves no adapters"
            await self._store.load_visiting(Path(asked.folder), asked.slot)
        except Exception as refused:  # the request that needs it ends on the other engine
            error = str(refused)
        self._connections[engine].send(Loaded(asked.number, error))


class SharedAdapterStore:
    """An `AdapterStore` that also loads the adapters' experts on the other engines."""

    def __init__(self, store: AdapterStore, peers: Peers) -> None:
        self._store, self._peers = store, peers
        self._folders: dict[int, Path] = {}  # by place
        self.num_places, self.num_slots = store.num_places, store.num_slots

    def read(self, folder: Path, place: int) -> AdapterInfo:
        self._folders[place] = folder.resolve()
        return self._store.read(folder, place)

    async def load(self, place: int, slot: int) -> None:
        folder, shared_slot = self._folders[place], self._store.first_slot + slot
        results = await asyncio.gather(
            self._store.load(place, slot),
            self._peers.load_experts(folder, shared_slot),
            return_exceptions=True,  # an error makes the slot free: nobody may still write to it
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
