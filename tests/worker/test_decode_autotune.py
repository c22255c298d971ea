"""What graphs are timed on: rows of slots that nobody has, and nothing is left of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from asyncllm import LLM, SamplingParams
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.engine import engine_steps
from asyncllm.graphs.decode_graphs import DecodeKernel
from asyncllm.graphs.pool import GraphPool
from asyncllm.worker import decode_kernels, step_captures
from asyncllm.worker.decode_autotune import CONTEXT_TOKENS, NUM_ROUNDS, DecodeAutotune
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.model_runner import ModelRunner
from tests.device_clock import DeviceClock
from tests.worker.recorded_graph import RecordedGraph

CPU = torch.device("cpu")
MS = 1e-3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    return DeviceClock(monkeypatch)


@pytest.mark.parametrize(
    ("block_size", "table", "row_pages"),
    [(16, 40, 32), (16, 33, 32), (16, 32, 31), (16, 1, 0), (256, 40, 2), (2048, 4, 0)],
)
def test_rows(clock: DeviceClock, block_size: int, table: int, row_pages: int) -> None:
    num_pages, num_rows, position = 7, 3, row_pages * block_size
    state = DeviceState(5, table, 8, CPU)
    state.positions[4], state.block_tables[0, 4] = 77, 77  # of a row that is not timed
    slots = torch.zeros(num_rows, dtype=torch.int32)

    def replay(ms: float) -> Callable[[], None]:
        def step() -> None:
            clock.ms += ms
            assert slots.tolist() == [1, 2, 3]
            assert state.positions.tolist() == [0, *[position] * num_rows, 77]
            tables = state.block_tables[0, 1:4]
            assert (tables[:, row_pages:] == 0).all()  # the new token goes to the padding page
            read = tables[:, :row_pages]
            assert ((read >= 1) & (read <= num_pages)).all()
            assert read.unique().numel() == min(num_rows * row_pages, num_pages)
            state.positions[1:4] += 1  # as a step does

        return step

    autotune = DecodeAutotune(state, block_size, num_pages)
    assert autotune(slots, [replay(3.0), replay(2.0)]) == pytest.approx([3 * MS, 2 * MS])
    assert position <= CONTEXT_TOKENS
    for tensor in (slots, state.positions[:4], state.block_tables[0, :4]):
        assert not tensor.any()
    assert state.positions[4] == 77 and (state.block_tables[0, 4] == 77).all()


def test_the_quickest_of_some_counts_and_they_alternate(clock: DeviceClock) -> None:
    """Another thread that has the GIL for a while must not decide."""
    order: list[str] = []
    delays = iter([40.0, *[0.0] * (2 * NUM_ROUNDS - 2), 30.0])

    def replay(name: str, ms: float) -> Callable[[], None]:
        def step() -> None:
            order.append(name)
            clock.ms += ms + next(delays)

        return step

    autotune = DecodeAutotune(DeviceState(2, 4, 8, CPU), 16, 9)
    slots = torch.zeros(1, dtype=torch.int32)
    times = autotune(slots, [replay("a", 2.0), replay("b", 1.0)])
    assert times == pytest.approx([2 * MS, 1 * MS])
    assert order == ["a", "b"] * NUM_ROUNDS


def test_nothing_is_left_where_a_step_fails(clock: DeviceClock) -> None:
    state = DeviceState(3, 40, 8, CPU)
    slots = torch.zeros(2, dtype=torch.int32)

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        DecodeAutotune(state, 16, 9)(slots, [fail])
    for tensor in (slots, state.positions, state.block_tables):
        assert not tensor.any()


def test_a_later_autotune_writes_to_no_page_that_is_cached(
    clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what is in the prefix cache, while nothing runs, and leaves it as it was."""

    def other_kernels(runner: ModelRunner, *_: object) -> list[DecodeKernel]:
        step = partial(runner.decode_step, forward=runner._layers)
        return [DecodeKernel("again", step, range(1, 4))]

    monkeypatch.setattr(TorchAttention, "supports_graphs", True)
    monkeypatch.setattr(step_captures, "GraphPool", partial(GraphPool, RecordedGraph))
    monkeypatch.setattr(decode_kernels, "other_kernels", other_kernels)
    monkeypatch.setattr(engine_steps, "QUIET_SECONDS", 600.0)  # the capture is ours
    args: dict[str, Any] = {"cuda_graph_sizes": [2, 3, 4], "prefill_graph_sizes": [4]}
    args |= {"num_gpu_blocks_override": 20, "max_num_seqs": 4, "swap_space": 0}
    prompts: Any = [{"prompt_token_ids": list(range(11, n))} for n in (60, 30)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM("tiny", **args, max_model_len=160) as llm:
        ours = llm.engine._running().worker
        assert ours.runner.graphs is not None and ours.num_pending_graphs == 1
        expected = llm.generate(prompts, params, use_tqdm=False)
        caches = ours.runner._cache.layers
        before = [cache.clone() for cache in caches]
        with torch.inference_mode():
            ours.runner.graphs.capture(3)
        assert ours.decode_kernels == {"layers": [2, 3, 4]}
        for cache, old in zip(caches, before, strict=True):
            old[0, :, 0] = cache[0, :, 0]
            assert torch.equal(cache, old)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert sum(output.num_cached_tokens for output in outputs) > 0
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
