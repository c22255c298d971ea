"""Measures the cost of a minimal step and of a prefill token, which set the prefill chunk.

They are timed at the start, while other threads build the tokenizer's tables and hold the GIL for
long, so some timings are too high, and one may be far off. `cost_of` corrects them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from asyncllm.graphs.decode_graphs import LAYERS
from asyncllm.types import StepCost
from asyncllm.worker.model_runner import ModelRunner

# Steps launched back to back, so that the host's time hides behind the device's. Fewer of them are
# timed if they take longer than LONG_SECONDS together.
NUM_STEPS = 4
LONG_SECONDS = 0.02
NUM_TIMES = 4
PREFILL_TOKENS = (512, 1024)  # both captured by then


def measure_step_cost(
    runner: ModelRunner, most_tokens: int, full_read_tokens: int, agree: Callable[[int], int]
) -> StepCost:
    """Time decode and prefill steps of the padding slot on the current CUDA stream.

    most_tokens: the most tokens of a step. full_read_tokens: the model's. With experts the minimal
    step is one that reads all experts, as a step with many decodes does.
    agree: the minimum of a number over all ranks, which must run the same steps.
    """
    stream = torch.cuda.current_stream()
    bare_tokens = min(full_read_tokens, most_tokens)
    is_small = bare_tokens == 1
    step = (
        bare_step(runner, stream.device) if is_small else partial(runner.run_padding, bare_tokens)
    )
    bare = _timings(step, stream, agree)
    asked = PREFILL_TOKENS if is_small else (*PREFILL_TOKENS, most_tokens)
    sizes = {min(num_tokens, most_tokens) for num_tokens in asked}
    prefills = {
        size: _timings(partial(runner.run_padding, size), stream, agree) for size in sorted(sizes)
    }
    return cost_of(bare, prefills)


def cost_of(bare: Sequence[float], prefills: Mapping[int, Sequence[float]]) -> StepCost:
    """The cost by at least two timings, in seconds, of a minimal step and of prefills by tokens.

    The second quickest timing of each step counts: delays only add time, and a single quicker one
    may be wrong. Longer prefills bound the time of the minimal step from above, and the best time
    per token of any prefill counts.
    """
    steps = {num_tokens: sorted(times)[1] for num_tokens, times in prefills.items()}
    return StepCost(
        min(sorted(bare)[1], *steps.values()),
        min(seconds / num_tokens for num_tokens, seconds in steps.items()),
    )


def _timings(
    step: Callable[[], object], stream: torch.cuda.Stream, agree: Callable[[int], int]
) -> list[float]:
    """Seconds per step, measured NUM_TIMES."""
    first = _timed(step, 1, stream)  # may include the loading of kernels
    num_steps = agree(min(NUM_STEPS, 1 + int(LONG_SECONDS / first)))
    return [_timed(step, num_steps, stream) for _ in range(NUM_TIMES)]


def _timed(step: Callable[[], object], num_steps: int, stream: torch.cuda.Stream) -> float:
    """Seconds per step of `num_steps` steps."""
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    stream.synchronize()
    return (time.perf_counter() - start) / num_steps


def bare_step(runner: ModelRunner, device: torch.device) -> Callable[[], object]:
    """The smallest decode step by the kernels of layers, which steps with prompts run, as a graph's
    replay if there is one. The persistent kernel's would say less than GEMMs take."""
    if runner.in_parts:
        return partial(runner.run_padding, 1)
    graphs = runner.graphs
    if not graphs:
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        return partial(runner.decode_step, slots, 1)
    runner.inputs.clear()
    by_layers = graphs.implementations.get(LAYERS, list(graphs))
    return graphs[by_layers[0]].replay
