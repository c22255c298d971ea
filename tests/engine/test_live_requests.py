"""Whatever a step does, every live request ends once and hears of it, and the engine goes on."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm import (
    AsyncLLMEngine,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestOutput,
    SamplingParams,
)
from asyncllm.engine import engine_steps
from asyncllm.engine.engine_core import EngineCore
from asyncllm.engine.stats import IterationStats, SchedulerStats
from asyncllm.engine.step_clock import StepClock
from asyncllm.step_plan import StepPlan
from asyncllm.types import TokenUpdate
from asyncllm.worker.worker import Worker
from tests.engine.builders import scheduled_requests
from tests.engine.test_async_engine import (
    ENDLESS,
    GREEDY,
    set_queue_clock_forward,
    settle,
    small_engine,
)
from tests.waiting import PATIENCE_SECONDS, run, until

SEARCH = SamplingParams(n=2, use_beam_search=True, max_tokens=4, ignore_eos=True)
SHORT = replace(GREEDY, max_tokens=3)


def core_of(engine: AsyncLLMEngine) -> EngineCore:
    assert engine._core is not None
    return engine._core


def is_scheduled(core: EngineCore, name: str) -> bool:
    """Whether the scheduler has a request of that name, or beams of it."""
    return any(key.split("\0")[0] == name for key in scheduled_requests(core.live.scheduler))


async def outcome(engine: AsyncLLMEngine, prompt: str, params: SamplingParams) -> RequestOutput:
    return await engine.generate(prompt, params, request_id=prompt)


class FailingOutputs:
    """`process` raises once, at a step after which the scheduler has nothing left of `name`."""

    def __init__(self, core: EngineCore, name: str) -> None:
        self.core, self.name = core, name
        self.process = core.live.outputs.process
        core.live.outputs.process = self  # type: ignore[method-assign, assignment]

    def __call__(self, updates: list[TokenUpdate], *rest: Any) -> Any:
        if not is_scheduled(self.core, self.name):
            self.core.live.outputs.process = self.process  # type: ignore[method-assign]
            raise ArithmeticError("planted")
        return self.process(updates, *rest)


@pytest.mark.slow
@pytest.mark.parametrize("params", [SEARCH, SHORT], ids=["beam search", "by its length"])
def test_what_ended_in_a_step_whose_outputs_fail_ends_once(params: SamplingParams) -> None:
    """With the error, a search too, of which all beams' requests have ended."""

    async def main() -> None:
        async with small_engine() as engine:
            expected = (await outcome(engine, "ends", params)).outputs
            longer = asyncio.create_task(outcome(engine, "longer", ENDLESS))
            await until(lambda: engine.stats().num_running)
            ending = asyncio.create_task(outcome(engine, "ends", params))
            await until(lambda: is_scheduled(core_of(engine), "ends"))
            FailingOutputs(core_of(engine), "ends")
            for request in (longer, ending):
                with pytest.raises(RequestFailedError, match="planted"):
                    await request
            await settle(engine)
            assert (await outcome(engine, "ends", params)).outputs == expected

    run(main())


async def behind_an_endless_one(engine: AsyncLLMEngine) -> tuple[Any, Any]:
    """(A request that runs, a search that waits for it)."""
    running = asyncio.create_task(outcome(engine, "running", ENDLESS))
    await until(lambda: engine.stats().num_running == 1)
    searching = asyncio.create_task(outcome(engine, "search", SEARCH))
    await until(lambda: engine.stats().num_waiting >= 1)
    return running, searching


def test_a_search_that_waits_outlives_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with small_engine(max_num_seqs=1) as engine:
            expected = (await outcome(engine, "search", SEARCH)).outputs
            running, searching = await behind_an_endless_one(engine)
            core = core_of(engine)
            launch = core.worker.launch

            def fail_once(*_: Any) -> Any:
                monkeypatch.setattr(core.worker, "launch", launch)
                raise ArithmeticError("planted")

            monkeypatch.setattr(core.worker, "launch", fail_once)
            with pytest.raises(RequestFailedError, match="planted"):
                await running
            assert (await searching).outputs == expected
            await settle(engine)
            monkeypatch.undo()

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("ends_by", ["abort", "too long a wait"])
def test_a_search_that_waits_ends_with_its_beams(
    monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    async def main() -> None:
        async with small_engine(max_num_seqs=1) as engine:
            running, searching = await behind_an_endless_one(engine)
            if ends_by == "abort":
                engine.abort("search", "disconnect")
                assert not is_scheduled(core_of(engine), "search")
                assert engine.recorder.aborts == {"disconnect": 1}  # none of them a beam's
                reasons = [answer.finish_reason for answer in (await searching).outputs]
                assert reasons == ["abort"] * 2
            else:
                set_queue_clock_forward(monkeypatch, 601)
                with pytest.raises(QueueFullError, match=r"^request search: waited"):
                    await searching
                monkeypatch.undo()
            engine.abort("running")
            assert (await running).finished
            await settle(engine)

    run(main())


def test_a_search_of_which_a_beam_fails_does_so_under_its_own_name() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            core = core_of(engine)
            searching = asyncio.create_task(outcome(engine, "search", SEARCH))
            await until(lambda: is_scheduled(core, "search"))
            requests = [owner.request for owner in core.live.outputs.requests.values()]
            beams = [request for request in requests if request.parent is not None]
            core.live.fail(beams[:1], "its logits are not finite")
            with pytest.raises(RequestFailedError, match=r"^request search: its logits are not"):
                await searching
            await settle(engine)

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1, -1], ids=["first", "text", "last"])
def test_a_sink_that_raises_hurts_its_own_request_only(failing: int) -> None:
    """failing: which call raises; with -1 that of the last output."""

    async def main() -> None:
        async with small_engine() as engine:
            expected = (await outcome(engine, "other", GREEDY)).outputs
            other = asyncio.create_task(outcome(engine, "other", GREEDY))
            calls: list[RequestOutput | str] = []

            def raise_once(update: RequestOutput | str) -> None:
                calls.append(update)
                is_last = isinstance(update, RequestOutput) and update.finished
                if is_last if failing == -1 else len(calls) == failing + 1:
                    raise ArithmeticError("planted")

            def take_text(text: str, num_tokens: int) -> None:
                raise_once(text)

            await engine.add_request("bad", "bad", GREEDY, raise_once, text_sink=take_text)
            assert (await other).outputs == expected
            await settle(engine)
            last = calls[-1]
            assert isinstance(last, RequestOutput) and last.finished
            if failing == -1:
                assert last.error is None and len(calls) == GREEDY.max_tokens
            else:
                assert str(last.error) == "request bad: output failed: ArithmeticError: planted"
                assert len(calls) == failing + 2  # told once more, that it is over

    run(main())


@pytest.mark.slow
def test_a_sink_that_raises_when_its_request_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with small_engine(max_num_seqs=1) as engine:
            other = asyncio.create_task(outcome(engine, "other", replace(GREEDY, max_tokens=60)))
            await until(lambda: engine.stats().num_running)
            heard: list[RequestOutput] = []

            def raise_always(output: RequestOutput) -> None:
                heard.append(output)
                raise ArithmeticError("planted")

            await engine.add_request("late", "late", GREEDY, raise_always)
            set_queue_clock_forward(monkeypatch, 601)
            assert (await other).finished
            assert [type(output.error) for output in heard] == [QueueFullError]
            engine.check_idle()

    run(main())


def test_an_observer_that_raises_is_told_no_more() -> None:
    class Observer:
        num_calls = 0

        def record(self, stats: SchedulerStats, iteration: IterationStats) -> None:
            self.num_calls += 1
            raise ArithmeticError("planted")

    async def main() -> None:
        bad = Observer()
        async with small_engine() as engine:
            engine.stat_loggers.append(bad)
            assert (await outcome(engine, "hello", GREEDY)).finished
        assert bad.num_calls == 1

    run(main())


@pytest.mark.parametrize("lost", [False, True], ids=["device answers", "device lost"])
def test_while_the_device_is_asked_requests_come_and_go(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """After a failed step: a queued one is aborted, its id is still taken, a new one arrives."""

    async def main() -> None:
        async with small_engine(max_num_seqs=1) as engine:
            core = core_of(engine)
            launch, asked, go = core.worker.launch, threading.Event(), threading.Event()

            def fail_once(*_: Any) -> Any:
                monkeypatch.setattr(core.worker, "launch", launch)
                raise ArithmeticError("planted")

            def drain() -> None:
                asked.set()
                assert go.wait(PATIENCE_SECONDS)
                if lost:
                    raise ArithmeticError("lost")

            running = asyncio.create_task(outcome(engine, "running", ENDLESS))
            await until(lambda: engine.stats().num_running == 1)
            gone = asyncio.create_task(outcome(engine, "gone", ENDLESS))
            stays = asyncio.create_task(outcome(engine, "stays", SHORT))
            await until(lambda: engine.stats().num_waiting == 2)
            monkeypatch.setattr(core.worker, "drain", drain)
            monkeypatch.setattr(core.worker, "launch", fail_once)
            with pytest.raises(RequestFailedError, match="planted"):
                await running
            await until(asked.is_set)
            gone.cancel()
            with pytest.raises(InvalidRequestError, match="in use"):
                await outcome(engine, "stays", SHORT)
            new = asyncio.create_task(outcome(engine, "new", SHORT))
            await until(lambda: "new" in scheduled_requests(core.live.scheduler))
            go.set()
            for request in (stays, new):
                if lost:
                    with pytest.raises(RequestFailedError, match="device is lost"):
                        await request
                else:
                    assert (await request).finished
            assert gone.cancelled()
            if not lost:
                await settle(engine)
            engine.check_idle()
            monkeypatch.undo()

    run(main())


def test_what_sinks_have_queued_goes_before_the_observers() -> None:
    """A server's frames are written in the turn after: the step's record is made behind them."""

    class Watcher:
        def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
            if iteration.step is not None:
                heard.append(iteration.step.step_id)

    heard: list[int] = []
    written: list[int] = []  # how many steps the observers had heard of by then

    async def test() -> None:
        async with small_engine() as engine:
            engine.stat_loggers.append(Watcher())
            ended, loop = asyncio.Event(), asyncio.get_running_loop()

            def sink(output: RequestOutput) -> None:
                loop.call_soon(lambda: written.append(len(heard)))
                if output.finished:
                    ended.set()

            await engine.add_request("r", "Once upon a time", GREEDY, sink)
            await ended.wait()
            await until(lambda: len(heard) == len(written))

    run(test())
    assert written == list(range(GREEDY.max_tokens or 0))
    assert heard == sorted(heard), "in the order of the steps"


def test_prompts_are_hashed_when_the_device_has_their_step() -> None:
    found: list[bool] = []  # at a launch: whether a plan would find the prompt's first block

    async def test() -> None:
        async with small_engine() as engine:
            core = core_of(engine)
            launch = core.worker.launch

            def watched(plan: StepPlan) -> Any:
                if plan.prefills:
                    (row,) = plan.prefills
                    found.append(bool(core.live.scheduler.blocks.prefixes.match(row.seq)))
                return launch(plan)

            core.worker.launch = watched  # type: ignore[method-assign]
            prompt = list(range(300, 340))
            for _ in range(2):
                await engine.generate({"prompt_token_ids": prompt}, GREEDY)

    run(test())
    assert found == [False, True]


@pytest.mark.parametrize("runs_on_host", [False, True])
def test_the_last_moment_before_a_plan_is_no_turns_that_keep_the_gil_from_a_step(
    monkeypatch: pytest.MonkeyPatch, runs_on_host: bool
) -> None:
    """The clock moves by what is slept, and by an eighth of a timer's tick in each turn."""
    now, slept = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds or 1 / 8

    async def test() -> None:
        async with small_engine() as engine:
            steps = core_of(engine).steps
            with monkeypatch.context() as patch:
                patch.setattr(Worker, "runs_on_host", runs_on_host)
                patch.setattr(StepClock, "seconds_to_plan", lambda self, now: 3.5)
                patch.setattr(engine_steps, "TIMER_SECONDS", 1.0)
                patch.setattr(engine_steps, "time", SimpleNamespace(monotonic=lambda: now[0]))
                patch.setattr(engine_steps, "asyncio", SimpleNamespace(sleep=sleep))
                await steps.wait_to_plan()

    run(test())
    assert slept == [2.5, *([] if runs_on_host else [0] * 8)]
