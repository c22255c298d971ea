"""The chunk that timings of the start lead to does not hang on a single one of them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.engine.chunk_policy import CHUNK_MULTIPLE, ChunkPolicy
from asyncllm.graphs.decode_graphs import DecodeGraphs
from asyncllm.graphs.pool import GraphPool
from asyncllm.types import StepCost
from asyncllm.worker.step_cost import NUM_TIMES, bare_step, cost_of
from tests.worker.recorded_graph import RecordedGraph

SIZES = (16, 32, 64, *range(128, 1025, 128), *range(1280, 2049, 256))
# About what a bare step and prefills of 512 and 1024 tokens take, in seconds.
MODELS = {
    "8B, H100": (6.0e-3, {512: 12.2e-3, 1024: 23.0e-3}),
    "8B, H200": (4.2e-3, {512: 11.0e-3, 1024: 20.8e-3}),
    "0.6B, H200": (0.9e-3, {512: 1.6e-3, 1024: 2.9e-3}),
}
# As measured (docs/log/ranks.md): 16 rows by the layers' kernels, and prompts.
RANKS = {
    "8B, an H200": (4.1e-3, {512: 11.2e-3, 1024: 22.6e-3}),
    "8B, two H200s": (2.63e-3, {512: 7.94e-3, 1024: 13.8e-3}),
    "8B, four H200s": (2.06e-3, {512: 7.28e-3, 1024: 11.4e-3}),
}
NOISE = 0.02
BAD = (0.0, 0.3, 0.9, 1.5, 4.0, 40.0)  # what the bad timing is, of the true one


def chunk(cost: StepCost) -> int:
    found = ChunkPolicy.measured(cost, SIZES).chunk_tokens
    assert found is not None
    return found


def noisy(seconds: float, rng: random.Random) -> list[float]:
    return [seconds * (1 + rng.uniform(0, NOISE)) for _ in range(NUM_TIMES)]


@pytest.mark.parametrize("name", MODELS)
def test_one_bad_timing_moves_the_chunk_by_a_bucket_at_most(name: str) -> None:
    bare, prefills = MODELS[name]
    true_chunk = chunk(cost_of([bare] * 2, {n: [s] * 2 for n, s in prefills.items()}))
    for seed in range(50):
        rng = random.Random(seed)
        timings = [noisy(bare, rng), *(noisy(seconds, rng) for seconds in prefills.values())]
        for times in timings:
            place = rng.randrange(NUM_TIMES)
            good = times[place]
            for share in BAD:
                times[place] = good * share
                cost = cost_of(timings[0], dict(zip(prefills, timings[1:], strict=True)))
                assert abs(chunk(cost) - true_chunk) <= CHUNK_MULTIPLE, (seed, share)
            times[place] = good


@pytest.mark.parametrize("name", MODELS)
def test_delays_of_most_timings_do_not_show(name: str) -> None:
    """As long as two of a kind were not delayed."""
    bare, prefills = MODELS[name]
    clean = cost_of([bare] * 2, {n: [s] * 2 for n, s in prefills.items()})
    delayed = {n: [s, 9 * s, s, 5 * s] for n, s in prefills.items()}
    assert cost_of([3 * bare, bare, 8 * bare, bare], delayed) == clean


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_tokens", [512, 1024])
def test_a_size_that_was_always_delayed_is_mended_by_the_other(name: str, num_tokens: int) -> None:
    """More tokens cost no more each; so the halved chunk of a busy start cannot come again."""
    bare, prefills = MODELS[name]
    timings = {n: [s * (3 if n == num_tokens else 1)] * NUM_TIMES for n, s in prefills.items()}
    true_chunk = chunk(cost_of([bare] * 2, {n: [s] * 2 for n, s in prefills.items()}))
    assert abs(chunk(cost_of([bare] * NUM_TIMES, timings)) - true_chunk) <= CHUNK_MULTIPLE


def test_a_bare_step_takes_no_longer_than_one_with_prompts() -> None:
    cost = cost_of([9.0, 9.0], {512: [2.0, 2.0], 1024: [3.0, 3.0]})
    assert cost == StepCost(2.0, 3.0 / 1024)


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("share", [0.9, 1.0, 1.1])
def test_a_slower_gpu_gets_the_same_chunk(name: str, share: float) -> None:
    """Two GPUs had chunks of 256 and of 512, by chance: 14,200 and 17,000 tokens/s."""
    bare, prefills = RANKS[name]
    cost = cost_of([bare] * 2, {n: [share * s] * 2 for n, s in prefills.items()})
    assert chunk(cost) == 512


@pytest.mark.parametrize(("sizes", "expected"), [((16, 8, 1), [16]), ((8, 1), [1])])
def test_the_bare_step_is_by_the_kernels_of_layers(sizes: list[int], expected: list[int]) -> None:
    """If any is: an engine of few sequences has none."""
    ran: list[int] = []

    def step(slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (slots + 1,)

    class Graph(RecordedGraph):
        def replay(self) -> None:
            ran.append(len(self._recorder.calls[0][3][0]))

    slots = torch.zeros(16, dtype=torch.int32)
    graphs = DecodeGraphs(step, slots, GraphPool(Graph, clear=slots.zero_), step)
    for size in sizes:
        graphs.capture(size)
    ran.clear()
    inputs = SimpleNamespace(clear=slots.zero_)
    runner: Any = SimpleNamespace(in_parts=False, graphs=graphs, inputs=inputs)
    bare_step(runner, torch.device("cpu"))()
    assert ran == expected
