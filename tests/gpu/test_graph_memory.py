"""Graphs of one pool share the memory of their outputs too."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from asyncllm.graphs import captured_times
from asyncllm.graphs.pool import GraphPool, weak_alias

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = (64, 48, 32, 16, 8)
VOCAB_SIZE = 200_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
@torch.inference_mode()
def test_memory_without_a_claim_to_it(dtype: torch.dtype) -> None:
    owner = torch.arange(3 << 20, device="cuda").view(3, -1).to(dtype)
    same = weak_alias(owner)
    assert same.dtype is dtype and same.data_ptr() == owner.data_ptr()
    assert torch.equal(same, owner)
    part = owner[1:, 5:90:3]  # as what is split off a projection
    assert torch.equal(weak_alias(part), part)
    before = torch.cuda.memory_allocated()
    del owner, part
    assert torch.cuda.memory_allocated() <= before - same.nbytes


@torch.inference_mode()
def test_outputs_of_all_sizes_take_the_place_of_the_largest() -> None:
    weight = torch.randn(VOCAB_SIZE, device="cuda")
    rows = torch.randn(SIZES[0], 1, device="cuda")

    def step(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = rows[:size] * weight
        return logits.argmax(dim=1), logits

    with torch.cuda.stream(torch.cuda.Stream()):
        pool = GraphPool()
        for size in SIZES:
            step(size)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        captured = {size: pool.record(partial(step, size)) for size in SIZES}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of what is no graph's
        taken = torch.cuda.memory_reserved() - before
        assert taken < 1.3 * SIZES[0] * VOCAB_SIZE * 4
        for size in (*SIZES, *reversed(SIZES)):
            rows.normal_()
            graph, outputs = captured[size]
            graph.replay()
            assert all(map(torch.equal, outputs, step(size)))


@torch.inference_mode()
def test_what_was_timed_in_graphs_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_times, "MOST_SPREAD", math.inf)  # beside another's work, too
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)

    def multiply() -> None:
        x @ weight

    with torch.cuda.stream(torch.cuda.Stream()):
        multiply()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        captured_times.captured_seconds([multiply, multiply])
        assert torch.cuda.memory_reserved() - before < x.nbytes
