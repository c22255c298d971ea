"""Adapters whose experts other engines load, too: when a load has ended, and what ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from asyncllm.engine.data_parallel.peers import SharedAdapterStore
from asyncllm.errors import LoRALoadError
from asyncllm.models.lora_adapter import AdapterInfo
from asyncllm.worker.adapters import AdapterStore
from tests.data_parallel.test_lockstep import linked
from tests.waiting import run, until


class SlowStore:
    """An engine's own adapters, whose copies end when they are told to."""

    num_places, num_slots, first_slot = 2, 1, 0

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.is_copied = False

    def read(self, folder: Path, place: int) -> AdapterInfo:
        return AdapterInfo(b"", 4)

    async def load(self, place: int, slot: int) -> None:
        await self.may_end.wait()
        self.is_copied = True


def test_a_slot_is_not_free_before_its_own_copy_has_ended() -> None:
    """Though another engine has refused the adapter: the next one's copy would mix with it."""

    async def main() -> None:
        async with linked(3) as every:  # the others serve no adapters, and say so
            own = SlowStore()
            store = SharedAdapterStore(cast(AdapterStore, own), every[0])
            store.read(Path("adapter"), 1)
            loading: asyncio.Task[Any] = asyncio.create_task(store.load(1, 1))
            await asyncio.sleep(0.01)  # it has asked
            with pytest.raises(LoRALoadError, match="serves no adapters"):
                await every[0].load_experts(Path("adapter"), 1)  # answered behind it
            await asyncio.sleep(0.01)
            assert not loading.done()
            own.may_end.set()
            with pytest.raises(LoRALoadError, match=r"engine 1: .*serves no adapters"):
                await loading
            assert own.is_copied

    run(main())


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "another is lost"])
def test_nobody_waits_for_an_answer_that_will_not_come(closes: bool) -> None:
    """Neither who waits, nor who comes later."""

    async def main() -> None:
        async with linked(2) as (ours, other):
            waiting = asyncio.create_task(ours.load_experts(Path("adapter"), 1))
            await asyncio.sleep(0)
            (ours if closes else other).close()
            with pytest.raises(LoRALoadError, match=r"the engine is closed|engine 1: "):
                await waiting
            await until(lambda: closes or ours.lockstep.lost)
            with pytest.raises(LoRALoadError, match=r"is closed|engine 1 is lost: "):
                await ours.load_experts(Path("adapter"), 1)

    run(main())
