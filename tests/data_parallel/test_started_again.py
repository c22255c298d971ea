"""An engine's process that is started again, as the server's process sees it: its adapters."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest

from asyncllm import LoRARequest
from asyncllm.engine.data_parallel import remote, wire
from asyncllm.engine.data_parallel.group import EngineGroup
from asyncllm.engine.data_parallel.remote import RemoteCore
from asyncllm.engine.data_parallel.spawn import EngineProcess
from asyncllm.engine.data_parallel.supervisor import Supervisor
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import SchedulerStats
from asyncllm.errors import EngineDeadError, LoRALoadError
from tests.waiting import run, until

ADAPTERS = [LoRARequest(name, lora_path=f"/{name}") for name in ("kept", "gone")]


class Process:
    """Is ready at once. answer: to a request to add an adapter; None: it ends instead."""

    answer: Callable[[wire.AddAdapter], wire.Done | None]
    sent: list[wire.Message] = []  # noqa: RUF012 (of all of them)

    def __init__(self, _: Any, received: Callable[[wire.FromEngine], None]) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.last_heard = math.inf
        self._received, self.connection = received, self

    async def connect(self, others: Sequence[Any]) -> None:
        """There is no process."""

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)
        if isinstance(message, wire.Start):
            self._received(wire.Ready({}, 1, SchedulerStats()))
        elif isinstance(message, wire.AddAdapter):
            if (done := type(self).answer(message)) is None:
                self.lost.set_result("it ended")
            else:
                self._received(done)

    async def kill(self) -> str:
        return "signal 9"


def taken(asked: wire.AddAdapter) -> wire.Done:
    return wire.Done(asked.number, None)


def taken_unless_gone(asked: wire.AddAdapter) -> wire.Done:
    if asked.adapter.request == ADAPTERS[1]:
        return wire.Done(asked.number, wire.Error.of(LoRALoadError("/gone: missing")))
    return taken(asked)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Callable[[], RemoteCore]:
    monkeypatch.setattr(remote, "EngineProcess", Process)
    monkeypatch.setattr(Process, "answer", staticmethod(taken), raising=False)
    return lambda: RemoteCore(0, {"enable_lora": True}, {}, cast(Recorder, None))


@pytest.fixture
def end_when_asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, a process ends when it is asked to add an adapter."""
    return lambda: monkeypatch.setattr(Process, "answer", staticmethod(lambda _: None))


async def started(core: Callable[[], RemoteCore], *adapters: LoRARequest) -> RemoteCore:
    engine = core()
    await engine.start(None)
    for each in adapters:
        await engine.lora.add(each)
    return engine


def test_an_adapter_whose_files_are_gone_is_forgotten(
    core: Callable[[], RemoteCore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        engine = await started(core, *ADAPTERS)
        for each in ADAPTERS:
            engine.lora.pin(each.lora_name)
        monkeypatch.setattr(Process, "answer", staticmethod(taken_unless_gone))
        await engine.start(None)
        assert engine.lora.requests == ADAPTERS[:1]
        assert "adapter gone is not loaded again: /gone: missing" in caplog.text

    run(main())


def test_a_process_that_is_lost_while_it_reads_adapters_again(
    core: Callable[[], RemoteCore], end_when_asked: Callable[[], None]
) -> None:
    """Its start fails, and forgets none: it is not told of by whoever watches it later."""

    async def main() -> None:
        engine = await started(core, ADAPTERS[0])
        end_when_asked()
        with pytest.raises(EngineDeadError, match=r"engine 0: it ended \(signal 9\)"):
            await engine.start(None)
        assert engine.lora.requests == ADAPTERS[:1]

    run(main())


def test_adapters_of_an_engine_that_is_down_are_loaded_when_it_is_up(
    core: Callable[[], RemoteCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adding, pinning and removing meanwhile is answered at once, and sent to nobody."""
    sent: list[wire.Message] = []
    monkeypatch.setattr(Process, "sent", sent, raising=False)

    async def main() -> None:
        engine = await started(core)
        engine.serve()
        await engine.lora.add(ADAPTERS[1])
        engine.lose("it ended")
        sent.clear()
        await asyncio.wait_for(engine.lora.add(ADAPTERS[0]), 1)
        engine.lora.pin("kept")
        assert engine.lora.remove("gone")
        engine.reset_prefix_cache()
        assert not sent
        await engine.start(None)
        _, added, pinned = sent
        assert isinstance(added, wire.AddAdapter) and added.adapter.name == "kept"
        assert pinned == wire.PinAdapter("kept")
        assert engine.lora.requests == ADAPTERS[:1]

    run(main())


def test_an_engine_that_is_lost_before_it_answers_is_down_as_well(
    core: Callable[[], RemoteCore], end_when_asked: Callable[[], None]
) -> None:
    async def main() -> None:
        engine = await started(core)
        engine.serve()
        end_when_asked()
        adding = asyncio.create_task(engine.lora.add(ADAPTERS[0]))
        await asyncio.sleep(0)
        engine.lose("it ended")
        await asyncio.wait_for(adding, 1)
        assert engine.lora.find("kept") == ADAPTERS[0]

    run(main())


def test_a_start_that_fails_leaves_nobody_waiting(
    core: Callable[[], RemoteCore], end_when_asked: Callable[[], None]
) -> None:
    async def main() -> None:
        engine = await started(core, ADAPTERS[0])
        engine.lose("it ended")
        end_when_asked()
        start = asyncio.create_task(engine.start(None))
        await asyncio.sleep(0)
        adding = asyncio.create_task(engine.lora.add(ADAPTERS[1]))
        with pytest.raises(EngineDeadError, match="it ended"):
            await start
        engine.fail("it cannot be started again")
        await asyncio.wait_for(adding, 1)

    run(main())


def test_the_engines_that_are_up_say_what_is_wrong_with_an_adapter(
    core: Callable[[], RemoteCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first one, which is down: it has an adapter once it is up, and none that is bad."""

    async def main() -> None:
        monkeypatch.setattr(Process, "answer", staticmethod(taken_unless_gone))
        engines = [core(), core()]
        for each in engines:
            await each.start(None)
            each.serve()
        group = EngineGroup(engines, cast(InputProcessor, None), 1)
        engines[0].lose("it ended")
        for each in ADAPTERS[:1], ADAPTERS[1:]:
            with nullcontext() if each == ADAPTERS[:1] else pytest.raises(LoRALoadError):
                await asyncio.wait_for(group.lora.add(*each), 1)
        assert group.lora.requests == engines[0].lora.requests == ADAPTERS[:1]
        engines[1].lose("it ended, too")
        with pytest.raises(EngineDeadError, match="engine 1: its process was lost: it ended, too"):
            await group.lora.add(ADAPTERS[1])

    run(main())


@pytest.mark.parametrize("num_failing", [1, 2, 3])
def test_a_start_that_fails_is_tried_again(
    num_failing: int,
    core: Callable[[], RemoteCore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As often as an engine that is lost may be started: three times."""

    async def connect(process: Process, others: Sequence[Any]) -> None:
        starts.append(process)
        if 1 < len(starts) <= 1 + num_failing:
            raise OSError("out of memory")

    async def main() -> None:
        engine = core()
        supervisor = Supervisor([engine])
        await supervisor.start()
        starts[0].lost.set_result("killed")
        if num_failing == 3:
            why = "killed (signal 9)" + 3 * "; and then: out of memory"
            assert await asyncio.wait_for(engine.failed, 10) == why
        else:
            await until(lambda: "engine 0 serves again" in caplog.text)
            assert engine.health() is None
        assert len(starts) == min(2 + num_failing, 4)
        await supervisor.close()

    starts: list[Process] = []
    monkeypatch.setattr(Process, "connect", connect)
    run(main())


def test_a_process_is_killed_though_the_wait_for_its_end_is_cancelled() -> None:
    async def main() -> None:
        process = EngineProcess({}, lambda message: None)
        process._process = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220
        process.lose("its connection is closed")
        killing = asyncio.create_task(process.kill())
        await asyncio.sleep(0.01)
        killing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killing
        assert await asyncio.to_thread(process._process.wait, 60) == -signal.SIGKILL

    run(main())
