"""A worker frees all that it holds at its end, and where its construction fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, SamplingParams, StructuredOutputsParams
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.config import EngineArgs
from asyncllm.engine.adapters import AdapterManager
from asyncllm.worker import step_captures, worker
from asyncllm.worker.worker import Worker
from tests.worker.recorded_graph import ForgetfulPool

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 16, "swap_space": 0, "max_num_seqs": 2}


@pytest.mark.slow
def test_adapter_slots_are_freed_although_the_engine_has_their_store() -> None:
    """Else a worker that takes its place finds the memory taken."""
    made = Worker(EngineArgs(enable_lora=True, **SMALL).create_engine_config())
    assert made.adapters is not None
    manager, held = AdapterManager(made.adapters), made.runner.lora
    assert held is not None
    freed = [
        weakref.ref(each) for each in (held, made.runner, *(p[1] for p in made.adapters._parts))
    ]
    del held
    made.close()
    gc.collect()
    assert [each() for each in freed] == [None] * len(freed)
    manager.check_integrity()  # which knows how many there were


def test_a_closed_engines_last_step_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the host, and is in a frame of the engine's task, whose end has a traceback."""
    is_freed = []

    def close(self: Worker) -> None:
        runner = weakref.ref(self.runner)
        closed(self)
        gc.collect()
        is_freed.append(runner() is None)

    closed = Worker.close
    monkeypatch.setattr(Worker, "close", close)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

    async def main() -> None:
        async with AsyncLLMEngine("tiny", **SMALL) as engine:
            await engine.generate("Answer:", params)
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert is_freed == [True]


@pytest.mark.slow
def test_a_construction_that_fails_late_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its thread, nor a cycle of runner and graphs that holds the model."""
    runners: list[Any] = []

    def fail(*_: Any) -> None:
        raise ValueError("lower swap_space")

    def noted(self: step_captures.StepCaptures, *args: Any, **more: Any) -> None:
        runners.append(args[1])
        init(self, *args, **more)

    init = step_captures.StepCaptures.__init__
    monkeypatch.setattr(step_captures.StepCaptures, "__init__", noted)
    monkeypatch.setattr(TorchAttention, "supports_graphs", True)
    monkeypatch.setattr(step_captures, "GraphPool", ForgetfulPool)
    monkeypatch.setattr(worker, "measure_swap_cost", fail)
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="lower swap_space"):
        Worker(EngineArgs(**SMALL).create_engine_config())
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith("asyncllm-cpu") for name in left)
    (runner,) = runners
    assert runner.graphs is None and runner.mixed.graphs is None
