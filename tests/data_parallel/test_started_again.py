"""An engine's process that is started again, as the server's process sees it: its adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from asyncllm import LoRARequest
from asyncllm.engine.data_parallel import remote, wire
from asyncllm.engine.data_parallel.remote import RemoteCore
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import SchedulerStats
from asyncllm.errors import EngineDeadError, LoRALoadError
from tests.waiting import run

ADAPTERS = [LoRARequest(name, lora_path=f"/{name}") for name in ("kept", "gone")]


class Process:
    """Is ready at once. answer: to a request to add an adapter; None: it ends instead."""

    answer: Callable[[wire.AddAdapter], wire.Done | None]

    def __init__(self, _: Any, received: Callable[[wire.FromEngine], None]) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._received, self.connection = received, self

    async def connect(self, others: Sequence[Any]) -> None:
        """There is no process."""

    def send(self, message: wire.Message) -> None:
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


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Callable[[], RemoteCore]:
    monkeypatch.setattr(remote, "EngineProcess", Process)
    monkeypatch.setattr(Process, "answer", staticmethod(taken), raising=False)
    return lambda: RemoteCore(0, {"enable_lora": True}, {}, cast(Recorder, None), [])


def test_an_adapter_whose_files_are_gone_is_forgotten(
    core: Callable[[], RemoteCore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(asked: wire.AddAdapter) -> wire.Done:
        gone = LoRALoadError("/gone: missing") if asked.adapter.request == ADAPTERS[1] else None
        return wire.Done(asked.number, None if gone is None else wire.Error.of(gone))

    async def main() -> None:
        engine = core()
        await engine.start(None)
        for each in ADAPTERS:
            await engine.lora.add(each)
            engine.lora.pin(each.lora_name)
        monkeypatch.setattr(Process, "answer", staticmethod(answer))
        await engine.start(None)
        assert engine.lora.requests == ADAPTERS[:1]
        assert "adapter gone is not loaded again: /gone: missing" in caplog.text

    run(main())


def test_a_process_that_is_lost_while_it_reads_adapters_again(
    core: Callable[[], RemoteCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start fails, and forgets none: it is not told of by whoever watches it later."""

    async def main() -> None:
        engine = core()
        await engine.start(None)
        await engine.lora.add(ADAPTERS[0])
        monkeypatch.setattr(Process, "answer", staticmethod(lambda _: None))
        with pytest.raises(EngineDeadError, match="engine 0: it ended"):
            await engine.start(None)
        assert engine.lora.requests == ADAPTERS[:1]

    run(main())
