"""Whatever a step does, every live request ends once and hears of it, and the engine goes on."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from asyncllm import (
    AsyncLLMEngine,
    InvalidRequestError,
    RequestFailedError,
    RequestOutput,
    SamplingParams,
)
from asyncllm.engine.engine_core import EngineCore
from asyncllm.types import TokenUpdate
from tests.engine.test_async_engine import ENDLESS, GREEDY, run, settle, small_engine, until

SEARCH = SamplingParams(n=2, use_beam_search=True, max_tokens=4, ignore_eos=True)
SHORT = replace(GREEDY, max_tokens=3)


def core_of(engine: AsyncLLMEngine) -> EngineCore:
    assert engine._core is not None
    return engine._core


async def outcome(engine: AsyncLLMEngine, prompt: str, params: SamplingParams) -> RequestOutput:
    return await engine.generate(prompt, params, request_id=prompt)


class FailingOutputs:
    """`process` raises once, at the step after which the scheduler has nothing left of `name`."""

    def __init__(self, core: EngineCore, name: str) -> None:
        self.core, self.name = core, name
        self.process = core.live.outputs.process
        core.live.outputs.process = self  # type: ignore[method-assign, assignment]

    def __call__(self, updates: list[TokenUpdate], *rest: Any) -> Any:
        if not self.core.live.scheduler.has_request(self.name):
            self.core.live.outputs.process = self.process  # type: ignore[method-assign]
            raise ArithmeticError("planted")
        return self.process(updates, *rest)


@pytest.mark.parametrize("params", [SEARCH, SHORT], ids=["beam search", "by its length"])
def test_what_ended_in_a_step_whose_outputs_fail_ends_with_the_error(
    params: SamplingParams,
) -> None:
    async def main() -> None:
        async with small_engine() as engine:
            expected = (await outcome(engine, "hello", params)).outputs
            longer = asyncio.create_task(outcome(engine, "longer", ENDLESS))
            await until(lambda: engine.stats().num_running)
            ending = asyncio.create_task(outcome(engine, "ends", params))
            await until(lambda: core_of(engine).live.scheduler.has_request("ends"))
            FailingOutputs(core_of(engine), "ends")
            for request in (ending, longer):
                with pytest.raises(RequestFailedError, match="planted"):
                    await request
            await settle(engine)
            assert (await outcome(engine, "hello", params)).outputs == expected

    run(main())


def test_a_sink_that_raises_keeps_nobody_from_hearing() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            others = [asyncio.create_task(outcome(engine, f"{i}", ENDLESS)) for i in range(2)]
            await until(lambda: engine.stats().num_running == len(others))

            def raise_always(output: RequestOutput) -> None:
                raise ArithmeticError("planted")

            await engine.add_request("bad", "bad", ENDLESS, raise_always)
            for other in others:
                with pytest.raises(RequestFailedError, match="planted"):
                    await other
            await settle(engine)
            assert (await outcome(engine, "hello", GREEDY)).finished

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
                assert go.wait(60)
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
            await until(lambda: core.live.scheduler.has_request("new"))
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
