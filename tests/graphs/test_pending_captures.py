"""Which graphs are captured first, and that the others follow when the engine has nothing to do."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.config import EngineArgs
from asyncllm.engine import engine_steps
from asyncllm.graphs.sized_graphs import first_sizes, later_sizes
from asyncllm.mesh_config import MeshConfig
from asyncllm.worker.step_captures import StepCaptures
from asyncllm.worker.worker import Worker
from tests.waiting import PATIENCE_SECONDS


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    return EngineArgs(max_num_seqs=max_num_seqs).create_engine_config().cuda_graph_sizes


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 48, 100, 256, 512])
def test_no_batch_takes_more_than_twice_its_size(max_num_seqs: int) -> None:
    sizes = default_sizes(max_num_seqs)
    first, later = first_sizes(sizes), later_sizes(sizes)
    assert sorted(first + later) == list(sizes)
    assert first == sorted(first, reverse=True) and first[0] == max(sizes)
    assert later == sorted(later, reverse=True)
    for rows in range(1, max(sizes) + 1):
        best = min(size for size in sizes if size >= rows)
        meanwhile = min(size for size in first if size >= rows)
        assert meanwhile <= max(2 * best, 4), (rows, best, meanwhile)


def test_few_are_captured_first() -> None:
    assert first_sizes(default_sizes(256)) == [256, 128, 64, 32, 16, 8, 4, 2, 1]


def captures_of_two_ranks(least_room: int) -> StepCaptures:
    """least_room: what the ranks agree on."""
    config = replace(EngineArgs().create_engine_config(), mesh=MeshConfig(2))
    inputs = SimpleNamespace(clear=None, token_ids=torch.zeros(1))
    runner: Any = SimpleNamespace(inputs=inputs)
    return StepCaptures(config, runner, lambda: None, lambda own: least_room, progress=False)


@pytest.mark.parametrize("all_have_room", [True, False])
def test_ranks_capture_later_sizes_where_all_have_room(all_have_room: bool) -> None:
    """One without memory would pad steps to another size than the others."""
    found: list[int] = []
    captures = captures_of_two_ranks(int(all_have_room))
    captures._capture(found.append, (1, 2, 4, 8, 12, 16), "decode")
    assert found == [16, 8, 4, 2, 1] and len(captures) == 1
    captures.capture_one()
    assert found == [16, 8, 4, 2, 1, *([12] if all_have_room else [])] and not captures


def test_a_rank_without_memory_does_not_go_on_with_other_sizes() -> None:
    def capture() -> None:
        raise torch.cuda.OutOfMemoryError("full")

    captures = captures_of_two_ranks(1)
    captures._pending.append(capture)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        captures.capture_one()


def test_a_capture_that_raises_is_not_tried_again() -> None:
    done: list[int] = []

    def capture(size: int) -> None:
        if size == 3:
            raise RuntimeError("no")
        done.append(size)

    config = EngineArgs(num_gpu_blocks_override=16, swap_space=0).create_engine_config()
    worker = Worker(config)
    worker._captures._pending.extend(partial(capture, size) for size in (4, 3, 2))
    worker.capture_graph()
    with pytest.raises(RuntimeError):
        worker.capture_graph()
    assert worker.num_pending_graphs == 1
    worker.capture_graph()
    assert done == [4, 2] and not worker.num_pending_graphs
    worker.close()


class FakeGraphs:
    """Stands in for a worker's pending graphs; sees whether requests were live at a capture."""

    def __init__(self, engine: AsyncLLMEngine, count: int) -> None:
        self.captured_while_live: list[bool] = []
        self.all_captured = asyncio.Event()
        self._engine = engine
        self.pending = deque([self._capture] * count)

    def _capture(self) -> None:
        self.captured_while_live.append(bool(self._engine._running().live.scheduler.num_requests))
        if not self.pending:
            self.all_captured.set()


def test_captured_while_idle_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_steps, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(engine_steps, "PAUSE_SECONDS", 0.0)

    async def run() -> list[bool]:
        async with AsyncLLMEngine("tiny", num_gpu_blocks_override=64, swap_space=0) as engine:
            fake = FakeGraphs(engine, 5)
            worker: Worker = engine._running().worker
            worker._captures._pending = fake.pending
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            # The task had nothing to capture when it went to sleep: this wakes it.
            answers = await asyncio.gather(*(engine.generate([5, 6, 7], params) for _ in range(4)))
            assert all(len(answer.outputs[0].token_ids) == 8 for answer in answers)
            await asyncio.wait_for(fake.all_captured.wait(), PATIENCE_SECONDS)
            again = await engine.generate([5, 6, 7], params)
            assert again.outputs[0].token_ids == answers[0].outputs[0].token_ids
            return fake.captured_while_live

    assert asyncio.run(run()) == [False] * 5


def test_no_memory_for_more_graphs_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    def capture() -> None:
        raise torch.cuda.OutOfMemoryError("full")

    config = EngineArgs(num_gpu_blocks_override=16, swap_space=0).create_engine_config()
    worker = Worker(config)
    worker._captures._pending = deque([capture] * 3)
    worker.capture_graph()
    assert worker.num_pending_graphs == 0
    assert "no memory for 3 more graphs" in caplog.text
    worker.close()
