"""Step times of a layout by rows of decodes and tokens of prompts, for simulated_device.py."""

from __future__ import annotations

import statistics

from rank_checks import LAYOUTS
from shape_times import SETTINGS, DeviceSteps, Load, all_captured

from asyncllm import AsyncLLMEngine

ROWS = (1, 2, 4, 8, 9, 16, 32, 64, 128, 256)
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ANSWER, REPETITIONS = 48, 6


async def measure(model: str, layout: str) -> None:
    """Prints medians. Rows have a context of 16 to 64 tokens; prompts are computed alone."""
    most = {"max_num_batched_tokens": max(TOKENS), "chunked_prefill_size": max(TOKENS)}
    times = DeviceSteps()
    engine = AsyncLLMEngine(model, **SETTINGS | LAYOUTS[layout] | most)
    engine.stat_loggers.append(times)
    async with engine:
        load = Load(engine)
        await load.answer(1, 16, 4)
        await all_captured(engine)
        for rows in ROWS:
            await load.answer(rows, 16, ANSWER)
        decode = {rows: round(statistics.median(times.ms[rows]), 3) for rows in ROWS}
        print(f"| {layout}, decodes | {decode} |", flush=True)
        times.prompt_ms.clear()
        for tokens in TOKENS:
            for _ in range(REPETITIONS):
                await load.answer(1, min(tokens, max(TOKENS) - 2), 1)
        prefill = {n: round(statistics.median(found), 2) for n, found in times.prompt_ms.items()}
        print(f"| {layout}, prompts | {prefill} |", flush=True)
