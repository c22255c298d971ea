"""The words of engines that step together: when they are heard, and which of them do not fit.

Over the sockets that the engines' processes are given. That whole engines agree so, in any order of
events, is tests/engine/test_lockstep_random.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from asyncllm.engine.data_parallel.links import EngineLink, link_engines
from asyncllm.engine.data_parallel.lockstep import Lockstep, OutOfStepError, Said
from asyncllm.engine.data_parallel.peers import Peers
from asyncllm.step_plan import CommonStep, StepKind, StepNeed, StepShape
from tests.waiting import run, until

NEEDS = [StepNeed(3, 17, True), StepNeed(), StepNeed(2, 0, False, False)]
STEP = CommonStep(StepShape(StepKind.MIXED, 20, True), False)


@asynccontextmanager
async def linked(num_engines: int) -> AsyncIterator[list[Peers]]:
    links = link_engines(num_engines)
    given = [EngineLink.of(link.place, link.sockets) for link in links]
    assert [link.address for link in given] == [links[0].address] * num_engines
    every = [Peers(link.place.number, link.peers, None) for link in given]
    for peers in every:
        await peers.connect()
    try:
        yield every
    finally:
        for peers in every:
            peers.close()
        links[0].close()


def needs_of(said: Sequence[Said]) -> list[StepNeed]:
    return [each.need for each in said]


def test_each_hears_all_in_the_order_of_engines() -> None:
    async def main() -> None:
        async with linked(3) as every:
            locksteps = [peers.lockstep for peers in every]
            for round_number in range(3):
                words = [each.say(NEEDS[i], i / 8) for i, each in enumerate(locksteps)]
                for said in await asyncio.gather(*words):
                    assert needs_of(said) == NEEDS
                    assert [each.lead_seconds for each in said] == [0, 1 / 8, 2 / 8]
                    assert {each.round for each in said} == {round_number}
                for lockstep in locksteps:
                    assert lockstep.round == round_number + 1 and not lockstep.is_begun
                    lockstep.last = STEP._replace(in_graph=bool(round_number))

    run(main())


def test_who_has_no_work_is_woken_by_who_has() -> None:
    async def main() -> None:
        async with linked(3) as every:
            locksteps = [peers.lockstep for peers in every]
            woken: list[int] = []
            for engine, lockstep in enumerate(locksteps):
                lockstep.wake = lambda engine=engine: woken.append(engine)  # type: ignore[misc]
            first = locksteps[1].say(NEEDS[1], 0.0)
            await until(lambda: sorted(woken) == [0, 2])
            assert [each.is_begun for each in locksteps] == [True, False, True]
            assert locksteps[1].missing == [0, 2] and locksteps[0].missing == [2]
            second = locksteps[0].say(NEEDS[0], 0.0)
            await until(lambda: locksteps[1].missing == [2])
            assert not first.done() and not second.done()
            third = locksteps[2].say(NEEDS[2], 0.0)
            for words in (first, second, third):
                assert needs_of(await words) == NEEDS

    run(main())


def test_one_that_is_ahead_by_a_word_is_heard_in_the_next_round() -> None:
    """It has heard all in this one, of whom another one's word is still on its way to the third."""

    async def main() -> None:
        told: list[Said] = []
        lockstep = Lockstep(0, [1, 2], told.append)
        words = lockstep.say(NEEDS[0], 0.0)
        lockstep.hear(1, Said(0, NEEDS[1], 0.0, None))
        lockstep.hear(1, Said(1, NEEDS[0], 0.0, STEP))
        assert not words.done()
        lockstep.hear(2, Said(0, NEEDS[2], 0.0, None))
        assert needs_of(await words) == NEEDS
        lockstep.last = STEP
        assert lockstep.is_begun and lockstep.missing == [2]
        words = lockstep.say(NEEDS[2], 0.0)
        lockstep.hear(2, Said(1, NEEDS[1], 0.0, STEP))
        assert needs_of(await words) == [NEEDS[2], NEEDS[0], NEEDS[1]]
        assert [said.last for said in told] == [None, STEP]

    run(main())


@pytest.mark.parametrize(
    "other",
    [Said(1, NEEDS[1], 0.0, None), Said(0, NEEDS[1], 0.0, STEP)],
    ids=["another round", "another step before"],
)
def test_words_that_do_not_fit(other: Said) -> None:
    async def main() -> None:
        lockstep = Lockstep(3, [1], lambda said: None)
        lockstep.hear(1, other)
        with pytest.raises(OutOfStepError, match=f"engine 1 is at step {other.round} after"):
            await lockstep.say(NEEDS[0], 0.0)

    run(main())


@pytest.mark.parametrize("waits", [True, False])
def test_an_engine_that_is_lost(waits: bool) -> None:
    """Who waits for its word hears of it, who speaks later too."""

    async def main() -> None:
        async with linked(3) as every:
            locksteps = [peers.lockstep for peers in every]
            words = [each.say(NEEDS[0], 0.0) for each in locksteps[:2] if waits]
            await asyncio.sleep(0)
            every[2].close()
            if not waits:
                await until(lambda: all(each.lost for each in locksteps[:2]))
                words = [each.say(NEEDS[0], 0.0) for each in locksteps[:2]]
            for each in words:
                with pytest.raises(OutOfStepError, match="engine 2 is lost: "):
                    await each

    run(main())
