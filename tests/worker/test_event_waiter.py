"""Waiting for the device: who waits where, what is polled, and how errors and ends come through."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from asyncllm.step_plan import StepKind, StepShape
from asyncllm.worker import event_waiter
from asyncllm.worker.event_waiter import POLL_S, EventWaiter

DECODES, OTHER_DECODES = StepShape(StepKind.DECODE, 1), StepShape(StepKind.DECODE, 9)
PROMPT = StepShape(StepKind.PREFILL, 128)


class Clock:
    """Stands in for `time`: it moves where it is told to, and a little with each look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


class Event:
    """Due at `due_s` of the clock; who synchronises moves the clock there."""

    def __init__(self, clock: Clock, due_s: float, error: Exception | None = None) -> None:
        self.threads: list[str] = []  # that synchronised
        self.num_queries = 0
        self._clock, self._due_s, self._error = clock, due_s, error

    def query(self) -> bool:
        self.num_queries += 1
        return self._clock.now >= self._due_s

    def synchronize(self) -> None:
        self.threads.append(threading.current_thread().name)
        if self._error is not None:
            raise self._error
        self._clock.now = max(self._clock.now, self._due_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(event_waiter, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


@pytest.fixture
def waiter() -> EventWaiter:
    return EventWaiter()


def test_a_step_that_is_done_costs_one_query(clock: Clock, waiter: EventWaiter) -> None:
    event = Event(clock, clock.now)
    asyncio.run(waiter.wait(event, clock.now, DECODES))
    assert (event.num_queries, event.threads) == (1, [])
    waiter.close()


def test_a_step_that_takes_long_is_left_to_the_thread(
    clock: Clock, waiter: EventWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_waiter, "LOOK_S", 60.0)  # on a busy machine the loop is the first
    event = Event(clock, clock.now + 0.01)
    asyncio.run(waiter.wait(event, clock.now, DECODES))
    assert (event.num_queries, event.threads) == (1, ["asyncllm-wait"])
    waiter.close()


def test_a_step_about_to_end_is_polled(clock: Clock, waiter: EventWaiter) -> None:
    """Known from the step before: 10 ms each, and 9.9 of the second are over."""

    async def test() -> None:
        start = clock.now
        await waiter.wait(Event(clock, start + 0.01), start, DECODES)
        clock.now = start + 0.0199
        second = Event(clock, start + 0.02)
        await waiter.wait(second, start + 0.001, DECODES)
        assert second.threads == [] and second.num_queries > 1

    asyncio.run(test())
    waiter.close()


def test_a_step_is_taken_to_last_as_long_as_the_last_of_its_shape(
    clock: Clock, waiter: EventWaiter
) -> None:
    """A prefill's first token is not looked for when a decode would be over."""

    async def take(shape: StepShape, seconds: float, looked_at: float) -> Event:
        start = clock.now
        event = Event(clock, start + seconds)
        clock.now += looked_at
        await waiter.wait(event, start, shape)
        return event

    async def test() -> None:
        for shape, seconds in ((DECODES, 0.001), (PROMPT, 0.005)):  # both known from here on
            await take(shape, seconds, 0.0)
        early, late = await take(PROMPT, 0.005, 0.0009), await take(PROMPT, 0.005, 0.0049)
        assert early.threads and not late.threads, "by its own duration, not by the decode's"
        assert not (await take(OTHER_DECODES, 0.001, 0.0009)).threads, "which is still known"

    asyncio.run(test())
    waiter.close()


def test_a_first_token_is_looked_for_earlier(clock: Clock, waiter: EventWaiter) -> None:
    async def test() -> None:
        for shape, is_polled in ((DECODES, False), (PROMPT, True)):
            for looked_at in (0.0, 0.0095):
                start = clock.now
                event = Event(clock, start + 0.01)
                clock.now += looked_at
                await waiter.wait(event, start, shape)
            assert (event.threads == []) is is_polled, f"half a millisecond before: {shape}"

    asyncio.run(test())
    waiter.close()


def test_polling_is_bounded(clock: Clock, waiter: EventWaiter) -> None:
    """A step that takes longer than the one before goes to the thread after all."""

    async def test() -> None:
        start = clock.now
        await waiter.wait(Event(clock, start + 0.01), start, DECODES)
        clock.now = polled_from = start + 0.0199
        second = Event(clock, start + 0.03)
        moved: list[float] = []
        second.synchronize = lambda: moved.append(clock.now)  # type: ignore[method-assign]
        await waiter.wait(second, start + 0.001, DECODES)
        assert moved[0] - polled_from < 2 * POLL_S

    asyncio.run(test())
    waiter.close()


def test_others_get_their_turns_while_it_polls(clock: Clock, waiter: EventWaiter) -> None:
    turns: list[float] = []

    async def other() -> None:
        while True:
            turns.append(clock.now)
            await asyncio.sleep(0)

    async def test() -> None:
        start = clock.now
        await waiter.wait(Event(clock, start + 0.01), start, DECODES)
        clock.now = start + 0.0199
        task = asyncio.create_task(other())
        await waiter.wait(Event(clock, start + 0.02), start, DECODES)
        task.cancel()
        assert len(turns) > 10

    asyncio.run(test())
    waiter.close()


def test_what_the_device_raises_comes_out(clock: Clock, waiter: EventWaiter) -> None:
    async def test() -> None:
        broken = Event(clock, clock.now + 1, RuntimeError("an illegal memory access"))
        with pytest.raises(RuntimeError, match="illegal"):
            await waiter.wait(broken, clock.now, DECODES)
        await waiter.wait(Event(clock, clock.now + 1), clock.now, DECODES)  # the thread lives on

    asyncio.run(test())
    waiter.close()


def test_a_wait_may_be_cancelled_and_its_loop_closed() -> None:
    waiter = EventWaiter()
    release = threading.Event()
    event = SimpleNamespace(query=lambda: False, synchronize=release.wait)

    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await waiter.wait(event, time.perf_counter(), DECODES)

    asyncio.run(test())
    release.set()
    waiter.close()
    assert "asyncllm-wait" not in [thread.name for thread in threading.enumerate()]


class Unheard(Event):
    """Its thread does not come to say that it is over, as where the loop keeps the GIL."""

    def __init__(self, clock: Clock, queries: list[bool | Exception]) -> None:
        super().__init__(clock, clock.now + 0.01)
        self.heard = threading.Event()
        self._queries = queries

    def query(self) -> bool:
        found = self._queries.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def synchronize(self) -> None:
        self.heard.wait()


def test_the_loop_looks_for_itself_while_the_thread_waits(
    clock: Clock, waiter: EventWaiter
) -> None:
    event = Unheard(clock, [False, False, True])
    asyncio.run(waiter.wait(event, clock.now, DECODES))
    event.heard.set()
    waiter.close()


def test_what_the_loop_finds_wrong_is_raised(clock: Clock, waiter: EventWaiter) -> None:
    event = Unheard(clock, [False, RuntimeError("the device is lost")])
    with pytest.raises(RuntimeError, match="lost"):
        asyncio.run(waiter.wait(event, clock.now, DECODES))
    event.heard.set()
    waiter.close()
