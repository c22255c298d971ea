"""The cost of a bare decode step and of a token of prefill, which set the prefill chunk.

Timed at the start, while other threads make the tokenizer's tables and have the GIL for long
stretches, so some of the timings are too high, and one may be anything. What is known of steps
mends them: see `cost_of`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from asyncllm.types import StepCost
from asyncllm.worker.model_runner import ModelRunner

# At a time, one after the other: the host's share hides behind the device's. That of a long step
# hides in the step, so only as many are timed as take so long together.
NUM_STEPS = 4
LONG_SECONDS = 0.02
NUM_TIMES = 4
PREFILL_TOKENS = (512, 1024)  # both captured by then


def measure_step_cost(
    runner: ModelRunner, most_tokens: int, full_read_tokens: int, agree: Callable[[int], int]
) -> StepCost:
    """Time decode and prefill steps of the padding slot on the current CUDA stream.

    most_tokens: that a step may have. full_read_tokens: the model's. With experts the bare step is
    one that reads them all, as one beside many decodes does, and more tokens share its reading.
    agree: the least of all ranks' numbers, which run the same steps.
    """
    stream = torch.cuda.current_stream()
    bare_tokens = min(full_read_tokens, most_tokens)
    is_small = bare_tokens == 1
    bare_step = (
        _bare_step(runner, stream.device) if is_small else partial(runner.run_padding, bare_tokens)
    )
    bare = _timings(bare_step, stream, agree)
    asked = PREFILL_TOKENS if is_small else (*PREFILL_TOKENS, most_tokens)
    sizes = {min(num_tokens, most_tokens) for num_tokens in asked}
    prefills = {
        size: _timings(partial(runner.run_padding, size), stream, agree) for size in sorted(sizes)
    }
    return cost_of(bare, prefills)


def cost_of(bare: Sequence[float], prefills: Mapping[int, Sequence[float]]) -> StepCost:
    """The cost, from timings of a bare step and of prefills by tokens, two or more of each, in s.

    Of each step the second quickest counts: delays only add, and the one that is quicker need not
    be believed. A step of fewer tokens takes no longer than one of more, and no more for each of
    its tokens than one of fewer.
    """
    steps = {num_tokens: sorted(times)[1] for num_tokens, times in prefills.items()}
    return StepCost(
        min(sorted(bare)[1], *steps.values()),
        min(seconds / num_tokens for num_tokens, seconds in steps.items()),
    )


def _timings(
    step: Callable[[], object], stream: torch.cuda.Stream, agree: Callable[[int], int]
) -> list[float]:
    """Seconds that a step took, NUM_TIMES over."""
    first = _timed(step, 1, stream)  # it may load kernels, too
    num_steps = agree(min(NUM_STEPS, 1 + int(LONG_SECONDS / first)))
    return [_timed(step, num_steps, stream) for _ in range(NUM_TIMES)]


def _timed(step: Callable[[], object], num_steps: int, stream: torch.cuda.Stream) -> float:
    """Seconds of one of so many steps."""
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    stream.synchronize()
    return (time.perf_counter() - start) / num_steps


def _bare_step(runner: ModelRunner, device: torch.device) -> Callable[[], object]:
    """The smallest decode step: a graph's replay where there is one."""
    if runner.in_parts:
        return partial(runner.run_padding, 1)
    graphs = runner.graphs
    size = None if graphs is None else graphs.fitting(1)
    if graphs is None or size is None:
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        return partial(runner.decode_step, slots, 1)
    runner.inputs.clear()
    return graphs[size].replay
