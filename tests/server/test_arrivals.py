"""Requests that come together: in which turns of the loop they are looked at, and in which order.

The clock moves only where a test moves it, so a turn holds as many as fit into its slice.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from asyncllm.server.http import connection as arrivals
from asyncllm.server.http.connection import WOKEN_PER_TURN, Arrivals

PER_TURN = 4  # of what takes a quarter of a slice each
NUM = 3 * WOKEN_PER_TURN


class Desk:
    """Where a test's arrivals are looked at, each for a quarter of a slice of the clock's time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(arrivals, "SLICE_SECONDS", 1.0)
        self.turn = 0
        self.seen: list[tuple[int, int]] = []  # (turn of the loop, number)
        monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.arrivals = Arrivals()

    async def count_turns(self) -> None:
        """As the engine does, this runs once in each turn."""
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    def look(self, number: int) -> None:
        self.seen.append((self.turn, number))
        self.now += 1 / PER_TURN

    def read(self, number: int) -> None:
        if self.arrivals.take(lambda: self.look(number)):
            self.look(number)

    async def handle(self, number: int) -> None:
        await self.arrivals.turn()
        self.look(number)

    def most_in_a_turn(self) -> int:
        turns = [turn for turn, _ in self.seen]
        return max(map(turns.count, turns))

    @property
    def order(self) -> list[int]:
        return [number for _, number in self.seen]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


async def turns(number: int = 5 * NUM) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_one_alone_waits_for_nothing(desk: Desk) -> None:
    async def test() -> None:
        for number in range(3):
            desk.read(number)
            assert desk.order[-1] == number
            await desk.handle(number)  # the same piece of the same turn
            assert desk.order[-2:] == [number, number]
            await turns(3)

    asyncio.run(test())


def test_the_engine_has_its_turn_between_what_is_read(desk: Desk) -> None:
    async def test() -> None:
        engine = asyncio.create_task(desk.count_turns())
        await turns(1)
        for number in range(NUM):  # all in one turn, as from one poll of the sockets
            desk.read(number)
        assert desk.order == list(range(PER_TURN)), "the first do not wait"
        await turns()
        engine.cancel()

    asyncio.run(test())
    assert desk.order == list(range(NUM))
    assert desk.most_in_a_turn() == PER_TURN


def test_the_engine_has_its_turn_between_requests(desk: Desk) -> None:
    async def test() -> None:
        engine = asyncio.create_task(desk.count_turns())
        await asyncio.gather(*(desk.handle(number) for number in range(NUM)))
        engine.cancel()

    asyncio.run(test())
    assert desk.order == list(range(NUM))
    assert desk.most_in_a_turn() == PER_TURN
    assert desk.seen[-1][0] - desk.seen[0][0] <= 3 * NUM / PER_TURN, "and hardly more than one"


def test_an_idle_engine_launches_the_first_before_the_others_begin(desk: Desk) -> None:
    """It is woken by the first of them, and plans a turn after that."""
    planned: list[int] = []

    async def test() -> None:
        work = asyncio.Event()

        async def handle(number: int) -> None:
            await desk.handle(number)
            work.set()

        async def plan() -> None:
            await work.wait()
            await asyncio.sleep(0)
            planned.append(len(desk.seen))

        engine = asyncio.create_task(plan())
        await turns(1)
        await asyncio.gather(engine, *(handle(number) for number in range(NUM)))

    asyncio.run(test())
    assert planned == [PER_TURN]
    assert desk.order == list(range(NUM))


def test_requests_come_before_what_is_not_read_yet(desk: Desk) -> None:
    async def test() -> None:
        tasks = [asyncio.create_task(desk.handle(number)) for number in range(NUM)]
        await turns(1)
        desk.read(NUM)
        await asyncio.gather(*tasks)
        await turns(3)

    asyncio.run(test())
    assert desk.order == list(range(NUM + 1))


def test_who_leaves_its_place_holds_up_nobody(desk: Desk) -> None:
    async def test() -> None:
        tasks = [asyncio.create_task(desk.handle(number)) for number in range(NUM)]
        await turns(2)
        left = len(desk.order)
        for task in tasks[left:-1]:  # woken just now, about to be, and long before
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns(3)
        assert desk.order == [*range(left), NUM - 1]
        assert not desk.arrivals._requests and not desk.arrivals._reads

    asyncio.run(test())


def test_what_cannot_be_read_holds_up_nobody(desk: Desk) -> None:
    """Nobody else would ever be: newcomers queue behind it, and no turn would be theirs."""

    def fail() -> None:
        raise RuntimeError("unreadable")

    async def test() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: told.append(what))
        for number in range(PER_TURN):
            desk.read(number)
        assert not desk.arrivals.take(fail)
        for number in range(PER_TURN, NUM):
            desk.read(number)
        await turns()
        assert desk.order == list(range(NUM))
        assert len(told) == 1

    asyncio.run(test())


def test_when_nobody_waits_the_loop_rests(desk: Desk) -> None:
    async def test() -> None:
        for number in range(NUM):
            desk.read(number)
        await asyncio.gather(*(desk.handle(number) for number in range(NUM)))
        await turns()
        assert not desk.arrivals._is_scheduled

    asyncio.run(test())
