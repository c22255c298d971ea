"""What a bare decode step and a token of prefill cost: together they set the prefill chunk."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from asyncllm.types import PADDING_SLOT, StepCost
from asyncllm.worker.model_runner import ModelRunner

NUM_STEPS = 4  # at a time, one after the other: the host's share hides behind the device's
NUM_TIMES = 4
PREFILL_TOKENS = 1024


def measure_step_cost(runner: ModelRunner, most_tokens: int) -> StepCost:
    """Time decode and prefill steps of the padding slot on the current CUDA stream.

    most_tokens: that a step may have. The quickest of NUM_TIMES: other threads of the start, which
    make the tokenizer's tables, have the GIL for long stretches.
    """
    stream = torch.cuda.current_stream()
    num_tokens = min(PREFILL_TOKENS, most_tokens)
    return StepCost(
        _seconds(_bare_step(runner, stream.device), stream),
        _seconds(partial(runner.warm_up.prefill, num_tokens), stream) / num_tokens,
    )


def _seconds(step: Callable[[], object], stream: torch.cuda.Stream) -> float:
    step()
    times = []
    for _ in range(NUM_TIMES):
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            step()
        stream.synchronize()
        times.append(time.perf_counter() - start)
    return min(times) / NUM_STEPS


def _bare_step(runner: ModelRunner, device: torch.device) -> Callable[[], object]:
    """The smallest decode step: a graph's replay where there is one."""
    graphs = runner.graphs
    padded = graphs.padded_slots(np.full(1, PADDING_SLOT, np.int32)) if graphs is not None else None
    if graphs is None or padded is None:
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        return partial(runner.decode_step, slots, 1)
    graphs.set_slots(padded, torch.zeros(len(padded), dtype=torch.int32, device=device))
    return partial(graphs.replay, padded)
