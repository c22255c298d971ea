"""Step times of a layout by rows of decodes and tokens of prompts, for simulated_device.py."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from rank_checks import LAYOUTS
from shape_times import SETTINGS, Load, all_captured

from asyncllm import AsyncLLMEngine
from asyncllm.engine.stats import IterationStats, SchedulerStats
from asyncllm.step_plan import StepKind

ROWS = (1, 2, 4, 8, 9, 16, 32, 64, 128, 256)
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ANSWER, REPETITIONS = 48, 6


class StepTimes:
    """A `StatLogger`: milliseconds on the device by rows of decodes, and by tokens of prompts."""

    def __init__(self) -> None:
        self.decode, self.prefill = defaultdict[int, list[float]](list), defaultdict[int, Any](list)

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        if (step := iteration.step) is not None:
            is_decode = step.kind is StepKind.DECODE
            times, size = (self.decode, step.rows) if is_decode else (self.prefill, step.tokens)
            times[size].append(step.duration * 1e3)


async def measure(model: str, layout: str) -> None:
    """Prints medians. Rows have a context of 16 to 64 tokens; prompts are computed alone."""
    args = SETTINGS | LAYOUTS[layout] | {"max_num_batched_tokens": max(TOKENS)}
    times = StepTimes()
    engine = AsyncLLMEngine(model, **args | {"chunked_prefill_size": max(TOKENS)})
    engine.stat_loggers.append(times)
    async with engine:
        load = Load(engine)
        await load.answer(1, 16, 4)
        await all_captured(engine)
        for rows in ROWS:
            await load.answer(rows, 16, ANSWER)
        decode = {rows: round(statistics.median(times.decode[rows]), 3) for rows in ROWS}
        print(f"| {layout}, decodes | {decode} |", flush=True)
        times.prefill.clear()
        for tokens in TOKENS:
            for _ in range(REPETITIONS):
                await load.answer(1, min(tokens, max(TOKENS) - 2), 1)
        prefill = {n: round(statistics.median(found), 2) for n, found in times.prefill.items()}
        print(f"| {layout}, prompts | {prefill} |", flush=True)
