"""What a bare decode step costs; beside the cost of a prefill token it sets the prefill chunk."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from asyncllm.types import PADDING_SLOT, StepCost
from asyncllm.worker.model_runner import ModelRunner

NUM_STEPS = 8


def measure_step_cost(runner: ModelRunner, seconds_per_token: float) -> StepCost:
    """Time decode steps of the padding slot, one after the other, on the current CUDA stream."""
    stream = torch.cuda.current_stream()
    step = _bare_step(runner, stream.device)
    seconds = 0.0
    for num_steps in (1, NUM_STEPS):  # the first warms up
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        stream.synchronize()
        seconds = (time.perf_counter() - start) / num_steps
    return StepCost(seconds, seconds_per_token)


def _bare_step(runner: ModelRunner, device: torch.device) -> Callable[[], object]:
    """The smallest decode step: a graph's replay where there is one."""
    graphs = runner.graphs
    padded = graphs.padded_slots(np.full(1, PADDING_SLOT, np.int32)) if graphs is not None else None
    if graphs is None or padded is None:
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        return partial(runner.decode_step, slots, 1)
    graphs.set_slots(padded, torch.zeros(len(padded), dtype=torch.int32, device=device))
    return partial(graphs.replay, padded)
