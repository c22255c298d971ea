"""Adapters loaded, used, unloaded and reloaded at random, against an oracle of files and slots."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from asyncllm.engine.adapters import Adapter, AdapterManager
from asyncllm.errors import LoRALoadError
from asyncllm.lora import LoRARequest
from asyncllm.models.lora_adapter import AdapterInfo

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
        return AdapterInfo(hashlib.sha256(text.encode()).digest(), 4, ())

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
            path = f"/{name}"
            try:
                adapter = await manager.acquire(LoRARequest(name, lora_path=path))
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
        manager.check_integrity()

    asyncio.run(asyncio.wait_for(world(), 60))


def _raised(task: asyncio.Task[None]) -> bool:
    if not task.cancelled() and task.exception() is not None:
        raise task.exception()  # type: ignore[misc]
    return False
