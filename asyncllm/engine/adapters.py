"""Which LoRA adapters there are, and which of the model's slots each request's adapter has.

    registered      by name; its files are read when it is added, or first used
    in host memory  one of `num_places`; the least recently used gives way
    in a slot       of the model, as long as requests use it, and until another needs the slot

A request has its adapter in a slot before it is queued, and keeps it until its last output: the
scheduler knows no adapters. Where all slots are in use it waits here, first come, first served.
An adapter that is removed serves the requests that have it to their end. All of it is the loop's;
files are read in a thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, TypeVar

from asyncllm.engine.adapter import Adapter, Registered, Room
from asyncllm.engine.data_parallel.peers import SharedAdapterStore
from asyncllm.engine.output_state import Sink
from asyncllm.errors import LoRALoadError
from asyncllm.lora import LoRARequest
from asyncllm.outputs import RequestOutput
from asyncllm.types import NO_ADAPTER
from asyncllm.worker.adapters import AdapterStore

T = TypeVar("T")


class AdapterManager:
    def __init__(self, store: AdapterStore | SharedAdapterStore) -> None:
        self._store = store
        self._registered: dict[str, Registered] = {}
        self._adding: dict[str, Registered] = {}  # that are read before they have the name
        # Of the adapters in host memory, the least recently used first.
        self._held: OrderedDict[Adapter, None] = OrderedDict()
        self._free_places = deque(range(store.num_places))
        self._free_slots = deque(range(NO_ADAPTER + 1, NO_ADAPTER + 1 + store.num_slots))
        self._asking: Counter[str] = Counter()  # requests in `acquire`, by name
        self._room = Room()  # places and slots
        self._tasks: set[asyncio.Task[Any]] = set()  # that read and copy

    # --- names -------------------------------------------------------------------------------

    async def add(self, request: LoRARequest, *, reload: bool = False) -> None:
        """Register an adapter and read its files; under a name that is there, read them again
        where the path is another, or to `reload` it. Raises `LoRALoadError`, and then nothing has
        changed."""
        if not request.lora_name or not str(request.lora_path):
            raise LoRALoadError("an adapter needs a lora_name and a lora_path")
        known = self._registered.get(request.lora_name)
        if known is not None and known.request.lora_path == request.lora_path and not reload:
            await self._read(known)
            return
        name = request.lora_name
        fresh = None if reload else self._adding.get(name)  # many may add it at once: one reads
        if fresh is None or fresh.request.lora_path != request.lora_path:
            fresh = Registered(request)
            if not reload:
                self._adding[name] = fresh
        try:
            await self._read(fresh)
        finally:
            if fresh.reading is None and self._adding.get(name) is fresh:
                del self._adding[name]
        if not fresh.is_listed:
            before = self._registered.get(name)
            is_pinned = before is not None and before.adapter is not None and before.adapter.pinned
            self.remove(name)
            fresh.is_listed = True
            self._registered[name] = fresh
            if is_pinned:
                self.pin(name)

    def remove(self, name: str) -> bool:
        """Forget a name: requests that have the adapter go on. Whether it was there."""
        self._adding.pop(name, None)
        known = self._registered.pop(name, None)
        if known is not None and known.adapter is not None:
            known.adapter.pinned = False
            self._drop_if_unused(known.adapter)
        return known is not None

    def pin(self, name: str) -> None:
        """Keep an adapter in host memory, and in its slot once it has one."""
        adapter = self._registered[name].adapter if name in self._registered else None
        if adapter is None:
            raise LoRALoadError(f"the adapter {name!r} is not loaded")
        adapter.pinned = True
        self._room.wake()  # whoever waits for room that is pinned now hears of it

    def find(self, name: str) -> LoRARequest | None:
        known = self._registered.get(name)
        return None if known is None else known.request

    @property
    def requests(self) -> list[LoRARequest]:
        return [known.request for known in self._registered.values()]

    @property
    def running(self) -> list[str]:
        """Names of the adapters that requests have."""
        return [each.request.lora_name for each in self._held if each.num_users]

    @property
    def waiting(self) -> list[str]:
        """Names of those that requests wait for."""
        return list(self._asking)

    # --- requests ----------------------------------------------------------------------------

    async def acquire(self, request: LoRARequest, *, adds: bool = False) -> Adapter:
        """An adapter in a slot, for one request, until `release`. adds: it need not be known.

        Raises `LoRALoadError`, also where it was removed meanwhile.
        """
        self._asking[request.lora_name] += 1
        try:
            if adds:
                await self.add(request)
            return await self._acquire(request)
        finally:
            self._asking -= Counter({request.lora_name: 1})  # keeps no zero

    async def _acquire(self, request: LoRARequest) -> Adapter:
        adapter: Adapter | None = None
        while adapter not in self._held:  # else removed, or replaced, before this ran again
            known = self._registered.get(request.lora_name)
            if known is None or known.request.lora_path != request.lora_path:
                raise LoRALoadError(f"the adapter {request.lora_name!r} is not loaded")
            adapter = await self._read(known)
        assert adapter is not None
        adapter.num_users += 1
        try:
            while adapter.copying is None:
                if (slot := self._take_slot()) is None:
                    in_slots = [each for each in self._held if each.slot]
                    _check_unpinned(in_slots, self._store.num_slots, "slots (max_loras)")
                    await self._room.wait()
                    continue
                adapter.slot = slot
                copy = self._store.load(adapter.place, slot)
                adapter.copying = self._start(copy, partial(self._copied, adapter))
            await asyncio.shield(adapter.copying)
        except BaseException:
            self.release(adapter)
            raise
        self._held.move_to_end(adapter)
        return adapter

    def release(self, adapter: Adapter) -> None:
        adapter.num_users -= 1
        assert adapter.num_users >= 0, f"{adapter.request.lora_name} is released twice"
        if not adapter.num_users:
            self._drop_if_unused(adapter)
            self._room.wake()

    def releasing(self, adapter: Adapter, sink: Sink) -> Sink:
        """The sink of a request with this adapter, which it gives back with its last output."""
        is_held = True

        def receive(output: RequestOutput) -> None:
            nonlocal is_held
            if output.finished and is_held:  # a sink that raises gets the error as well
                is_held = False
                self.release(adapter)
            sink(output)

        return receive

    # --- places and slots --------------------------------------------------------------------

    async def _read(self, known: Registered) -> Adapter:
        """All that ask wait for one thread; where one is cancelled, it goes on for the others."""
        if known.adapter is not None and known.adapter in self._held:
            return known.adapter
        if known.reading is None:
            known.reading = self._start(self._read_files(known))
        known.num_readers += 1
        try:
            return await asyncio.shield(known.reading)
        finally:
            known.num_readers -= 1
            self._room.wake()

    async def _read_files(self, known: Registered) -> Adapter:
        try:
            while (place := self._take_place()) is None:
                _check_unpinned(self._held, self._store.num_places, "places (max_cpu_loras)")
                await self._room.wait()
                if not known.num_readers:
                    raise asyncio.CancelledError
            try:
                info = await asyncio.to_thread(self._store.read, known.request.folder, place)
            except BaseException:
                self._free_places.append(place)
                raise
            known.adapter = Adapter(known.request, place, info.content, info.rank)
            self._held[known.adapter] = None
            return known.adapter
        finally:
            known.reading = None
            if not known.num_readers and self._adding.get(known.request.lora_name) is known:
                del self._adding[known.request.lora_name]  # who added it was cancelled

    def _copied(self, adapter: Adapter, copying: asyncio.Task[None]) -> None:
        if copying.cancelled() or copying.exception() is not None:
            self._free_slot(adapter)

    def _start(
        self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None] | None = None
    ) -> asyncio.Task[T]:
        """A task that goes on whoever is cancelled, and whose error is theirs who wait for it."""
        task = asyncio.create_task(work, name="asyncllm adapter")
        self._tasks.add(task)
        if ended is not None:
            task.add_done_callback(ended)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # known, even if all who waited are gone
        self._room.wake()  # what was read or copied for nobody is room

    async def close(self) -> None:
        """Whoever waits here hears that the engine is closed. Until nothing is read or copied."""
        self._room.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take_place(self) -> int | None:
        if not self._free_places and (idle := self._idle()):
            self._drop(idle[0])
        return self._free_places.popleft() if self._free_places else None

    def _take_slot(self) -> int | None:
        if not self._free_slots and (idle := [each for each in self._idle() if each.slot]):
            self._free_slot(idle[0])
        return self._free_slots.popleft() if self._free_slots else None

    def _idle(self) -> list[Adapter]:
        """That nobody uses, waits for, copies or pinned, the least recently used first."""

        def is_idle(each: Adapter) -> bool:
            if each.num_users or each.pinned or each.is_copied:
                return False
            name = each.request.lora_name
            readers = (self._registered.get(name), self._adding.get(name))
            return not any(by and by.adapter is each and by.num_readers for by in readers)

        return [each for each in self._held if is_idle(each)]

    def _drop_if_unused(self, adapter: Adapter) -> None:
        """An adapter that no name stands for any more."""
        known = self._registered.get(adapter.request.lora_name)
        if (known is None or known.adapter is not adapter) and not adapter.num_users:
            self._drop(adapter)

    def _drop(self, adapter: Adapter) -> None:
        if adapter not in self._held:
            return
        if adapter.is_copied:  # for a request that was cancelled
            assert adapter.copying is not None
            adapter.copying.add_done_callback(lambda _: self._drop_if_unused(adapter))
            return
        del self._held[adapter]
        self._free_slot(adapter)
        self._free_places.append(adapter.place)
        self._room.wake()

    def _free_slot(self, adapter: Adapter) -> None:
        if adapter.slot != NO_ADAPTER:
            self._free_slots.append(adapter.slot)
            adapter.slot, adapter.copying = NO_ADAPTER, None

    def check_integrity(self) -> None:
        """Assert that each place and each slot is somebody's or free."""
        places = [*self._free_places, *(each.place for each in self._held)]
        slots = [*self._free_slots, *(each.slot for each in self._held if each.slot)]
        assert len(places) == len(set(places)), f"places {places}"
        assert sorted(slots) == list(range(1, 1 + self._store.num_slots)), f"slots {slots}"
        assert all(each.slot for each in self._held if each.copying is not None)


def _check_unpinned(held: Collection[Adapter], num: int, what: str) -> None:
    """Raises `LoRALoadError` where nobody will ever give one of them back."""
    if len(held) == num and all(each.pinned for each in held):
        raise LoRALoadError(f"all {num} {what} have adapters that are pinned")
