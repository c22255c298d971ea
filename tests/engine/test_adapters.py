"""Adapters loaded, used, unloaded and reloaded at random, against an oracle of files and slots.

And what happens to requests that wait for an adapter.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.engine.adapter import Adapter
from asyncllm.engine.adapters import AdapterManager
from asyncllm.errors import EngineDeadError, InvalidRequestError, LoRALoadError, QueueFullError
from asyncllm.lora import LoRARequest
from asyncllm.models.lora_adapter import AdapterInfo
from tests.engine.adapter_files import write_tiny_adapter

NUM_STEPS = 625  # of each of the 16 worlds
NAMES = [f"adapter{i}" for i in range(9)]


class FakeStore:
    """Files are texts; a copy takes a few turns of the loop. Asserts that nobody's slot is written
    and that no place changes while it is copied."""

    def __init__(self, num_places: int, num_slots: int) -> None:
        self.num_places, self.num_slots = num_places, num_slots
        self.files: dict[str, str] = {}
        self.places: dict[int, str] = {}
        self.slots: dict[int, str] = {}
        self.used: dict[int, int] = {}  # slot -> requests that read it
        self._copied: set[int] = set()

    def read(self, folder: Path, place: int) -> AdapterInfo:
        assert place not in self._copied, "a place is read into while it is copied"
        text = self.files[str(folder)]
        if text == "broken":
            raise LoRALoadError(f"{folder}: broken")
        self.places[place] = text
        return AdapterInfo(hashlib.sha256(text.encode()).digest(), 4)

    async def load(self, place: int, slot: int) -> None:
        assert not self.used.get(slot), "a slot is written that a request reads"
        self._copied.add(place)
        for _ in range(random.randrange(3)):
            await asyncio.sleep(0)
        self.slots[slot] = self.places[place]
        self._copied.discard(place)


async def inline(function: Any, *args: Any) -> Any:
    await asyncio.sleep(0)
    return function(*args)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_places", "num_slots"), [(1, 1), (3, 2), (5, 5), (4, 1)])
def test_random_worlds(
    seed: int, num_places: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)
    random.seed(seed)
    store = FakeStore(num_places, num_slots)

    async def world() -> None:
        manager = AdapterManager(store)  # type: ignore[arg-type]
        held: list[tuple[Adapter, str]] = []
        asking: set[asyncio.Task[None]] = set()
        version = 0

        async def use(name: str) -> None:
            request = LoRARequest(name, lora_path=f"/{name}")
            try:
                if random.random() < 0.1:
                    await manager.add(request, reload=True)
                adapter = await manager.acquire(request, adds=True)
            except LoRALoadError:
                return
            text = store.slots[adapter.slot]
            assert hashlib.sha256(text.encode()).digest() == adapter.content
            assert text.startswith(name), "another adapter's weights"
            store.used[adapter.slot] = store.used.get(adapter.slot, 0) + 1
            held.append((adapter, text))

        def give_back() -> None:
            adapter, text = held.pop(random.randrange(len(held)))
            assert store.slots[adapter.slot] == text, "its slot was written while it was used"
            store.used[adapter.slot] -= 1
            manager.release(adapter)

        for name in NAMES:
            store.files[f"/{name}"] = f"{name} 0"
        for _ in range(NUM_STEPS):
            name = random.choice(NAMES)
            match random.randrange(6):
                case 0 | 1:
                    asking.add(asyncio.create_task(use(name)))
                case 2 if held:
                    give_back()
                case 3:
                    version += 1
                    store.files[f"/{name}"] = random.choice([f"{name} {version}", "broken"])
                    manager.remove(name)
                case 4 if asking:
                    random.choice(list(asking)).cancel()
                case _:
                    await asyncio.sleep(0)
            asking -= {task for task in asking if task.done() and not _raised(task)}
            manager.check_integrity()
        while asking or held:
            if held:
                give_back()
            await asyncio.sleep(0)
            asking -= {task for task in asking if task.done() and not _raised(task)}
        assert not manager.running and not manager.waiting
        assert not manager._asking  # no entry of a name that nobody asks for
        manager.check_integrity()

    asyncio.run(asyncio.wait_for(world(), 60))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 (any condition will do)
        await asyncio.sleep(0.01)


def _raised(task: asyncio.Task[None]) -> bool:
    if not task.cancelled() and task.exception() is not None:
        raise task.exception()  # type: ignore[misc]
    return False


def test_a_cancelled_reader_keeps_its_place_until_its_thread_ends() -> None:
    class SlowStore(FakeStore):
        def __init__(self) -> None:
            super().__init__(num_places=1, num_slots=1)
            self.may_end = threading.Event()
            self.reading: set[int] = set()

        def read(self, folder: Path, place: int) -> AdapterInfo:
            assert place not in self.reading, "two threads write one place"
            self.reading.add(place)
            self.may_end.wait(20)
            self.reading.discard(place)
            return super().read(folder, place)

    store = SlowStore()
    store.files = {"/one": "one", "/two": "two"}

    async def test() -> None:
        manager = AdapterManager(store)  # type: ignore[arg-type]
        adding = [
            asyncio.create_task(manager.add(LoRARequest(name, lora_path=f"/{name}")))
            for name in ("one", "two")
        ]
        await until(lambda: bool(store.reading))
        adding[0].cancel()
        await asyncio.sleep(0.05)
        store.may_end.set()
        await adding[1]
        assert store.places == {0: "two"}
        # What the cancelled one read is not taken for what is there now.
        store.files["/one"] = "new"
        await manager.add(LoRARequest("one", lora_path="/one"))
        assert store.places == {0: "new"}
        manager.check_integrity()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_folder_is_read_again_after_its_only_reader_was_cancelled() -> None:
    store = FakeStore(num_places=2, num_slots=1)
    store.files = {"/one": "one"}

    async def test() -> None:
        manager = AdapterManager(store)  # type: ignore[arg-type]
        adding = asyncio.create_task(manager.add(LoRARequest("one", lora_path="/one")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        adding.cancel()
        await until(lambda: "one" in store.places.values() and not manager._tasks)
        store.files["/one"] = "new"
        await manager.add(LoRARequest("one", lora_path="/one"))
        assert "new" in store.places.values()
        manager.check_integrity()

    asyncio.run(asyncio.wait_for(test(), 30))


# --- with an engine ------------------------------------------------------------------------------

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
TINY: dict[str, Any] = {
    "max_model_len": 512,
    "num_gpu_blocks_override": 200,
    "swap_space": 0.01,
    "device": "cpu",
}


class OneSlot:
    """An engine with one slot, which a long request has; `wait` asks for another adapter."""

    def __init__(self, folder: Path, **engine_args: Any) -> None:
        self.loras = [
            LoRARequest(name, lora_path=write_tiny_adapter(folder / name, seed))
            for seed, name in enumerate(("one", "two"))
        ]
        self.engine = AsyncLLMEngine("tiny", enable_lora=True, max_loras=1, **TINY, **engine_args)

    async def begin(self) -> asyncio.Future[Any]:
        await self.engine.start()
        running = asyncio.ensure_future(self.engine.generate("A", LONG, lora_request=self.loras[0]))
        await until(lambda: self.engine.stats().num_running == 1 or running.done())
        assert self.engine.lora_activity()[0] == ["one"]
        return running

    async def wait(self) -> asyncio.Future[Any]:
        waiting = asyncio.ensure_future(self.engine.generate("B", LONG, lora_request=self.loras[1]))
        await until(lambda: self.engine.lora_activity()[1] == ["two"] or waiting.done())
        assert not waiting.done(), waiting
        return waiting


def test_who_waits_for_a_slot_hears_that_the_engine_closes(tmp_path: Path) -> None:
    async def test() -> None:
        slot = OneSlot(tmp_path)
        running, waiting = await slot.begin(), await slot.wait()
        assert slot.engine._core is not None
        await slot.engine._core.lora.acquire(slot.loras[0])  # so that its end frees nothing
        await slot.engine.aclose()
        for task in (running, waiting):
            with pytest.raises((EngineDeadError, RuntimeError)):
                await asyncio.wait_for(task, 10)

    asyncio.run(test())


def test_no_request_waits_for_what_is_pinned(tmp_path: Path) -> None:
    """The only slot and the only place, pinned by a request that runs; and a reload keeps that."""

    async def test() -> None:
        slot = OneSlot(tmp_path)
        async with slot.engine as engine:
            running, waiting = await slot.begin(), await slot.wait()
            await engine.pin_lora("one")
            for asked in (waiting, engine.generate("C", LONG, lora_request=slot.loras[1])):
                with pytest.raises(InvalidRequestError, match=r"all 1 .* adapters that are pinned"):
                    await asyncio.wait_for(asyncio.ensure_future(asked), 10)
            with pytest.raises(LoRALoadError, match="max_cpu_loras"):
                await asyncio.wait_for(engine.add_lora(slot.loras[1]), 10)
            running.cancel()
            with pytest.raises(InvalidRequestError, match="pinned"):
                await engine.generate("D", LONG, lora_request=slot.loras[1])
            assert await engine.remove_lora("one")
            await engine.generate("E", SamplingParams(max_tokens=1), lora_request=slot.loras[1])
            with pytest.raises(LoRALoadError, match="'one' is not loaded"):
                await engine.pin_lora("one")

    asyncio.run(test())


def test_a_pinned_adapter_is_pinned_when_its_files_are_read_again(tmp_path: Path) -> None:
    store = FakeStore(num_places=2, num_slots=1)
    store.files = {"/one": "one", "/two": "two", "/three": "three"}
    one, two, three = (LoRARequest(name, lora_path=f"/{name}") for name in ("one", "two", "three"))

    async def test() -> None:
        manager = AdapterManager(store)  # type: ignore[arg-type]
        await manager.add(one)
        manager.pin("one")
        await manager.add(one, reload=True)
        for other in (two, three, two):
            await manager.add(other)
            assert "one" in store.places.values()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_who_waits_for_a_slot_is_in_the_queue(tmp_path: Path) -> None:
    async def test() -> None:
        slot = OneSlot(tmp_path, max_queued_requests=1)
        async with slot.engine:
            running, waiting = await slot.begin(), await slot.wait()
            with pytest.raises(QueueFullError, match="max_queued_requests is 1"):
                await slot.engine.generate("C", LONG)
            waiting.cancel()
            running.cancel()
            await asyncio.wait([waiting, running])
            await slot.engine.generate("C", SamplingParams(max_tokens=1))
            slot.engine.check_idle()

    asyncio.run(test())


def test_who_waits_for_a_slot_too_long_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        slot = OneSlot(tmp_path, max_queue_seconds=0.2)
        async with slot.engine:
            running = await slot.begin()
            with pytest.raises(QueueFullError, match="max_queue_seconds"):
                await asyncio.wait_for(await slot.wait(), 10)
            running.cancel()

    asyncio.run(test())


def test_a_request_that_was_parsed_before_an_unload_does_not_load_it_again(tmp_path: Path) -> None:
    """As HTTP asks for it: the name was there when the body was read."""

    async def test() -> None:
        slot = OneSlot(tmp_path)
        async with slot.engine as engine:
            await engine.add_lora(slot.loras[0])
            assert await engine.remove_lora("one")
            with pytest.raises(InvalidRequestError, match="'one' is not loaded"):
                await engine.add_request("r", "A", LONG, print, lora_request=slot.loras[0])
            assert await engine.list_loras() == []

    asyncio.run(test())


def test_many_requests_for_new_adapters_read_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)
    names = [f"adapter{i}" for i in range(4)]

    class CountingStore(FakeStore):
        def __init__(self) -> None:
            super().__init__(len(names), len(names))
            self.reads: list[str] = []

        def read(self, folder: Path, place: int) -> AdapterInfo:
            self.reads.append(str(folder))
            return super().read(folder, place)

    async def ask() -> None:
        store = CountingStore()
        store.files = {f"/{name}": name for name in names}
        manager = AdapterManager(store)  # type: ignore[arg-type]
        requests = [LoRARequest(name, lora_path=f"/{name}") for name in names] * 8
        adapters = await asyncio.gather(*(manager.acquire(each, adds=True) for each in requests))
        assert sorted(store.reads) == sorted(store.files)
        for adapter in adapters:
            manager.release(adapter)
        manager.check_integrity()

    asyncio.run(asyncio.wait_for(ask(), 20))
