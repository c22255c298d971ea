"""The timings of gpu_shapes.py: a shape of all its layers, the engine alone, without HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from gpu_questions import Args
from gpu_timing import figures, time_http
from model_shapes import Case, bytes_of_step, write_shape

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from asyncllm.commands.bench import tpot_ms, ttft_ms
from asyncllm.config import EngineArgs
from asyncllm.engine.stats import IterationStats, SchedulerStats
from asyncllm.engine.text.prompt import TokensPrompt
from asyncllm.sampling_params import RequestOutputKind
from asyncllm.step_plan import StepKind

SETTINGS: Args = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.92,
    "swap_space": 0.5,
}
PROMPT_TOKENS, ANSWER_TOKENS, REPETITIONS = 128, 128, 2  # of lat1 and lat8
CONTEXT = PROMPT_TOKENS + ANSWER_TOKENS // 2  # of a row, on average
MANY = {"requests": 256, "prompt": 512, "answer": 128}  # of tput
PROFILED_TOKENS = 24
NUM_KERNELS = 14  # that are printed
BUDGET_BYTES = 24 << 30  # of `memory`


class DeviceSteps:
    """A `StatLogger` that keeps how long decode steps took on the device, by their rows, and steps
    with prompts, by their tokens."""

    def __init__(self) -> None:
        self.ms: dict[int, list[float]] = defaultdict(list)
        self.prompt_ms: dict[int, list[float]] = defaultdict(list)

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        if (step := iteration.step) is None:
            return
        if step.kind is StepKind.DECODE:
            self.ms[step.rows].append(step.duration * 1e3)
        else:
            self.prompt_ms[step.tokens].append(step.duration * 1e3)


class Load:
    """Requests of random tokens, never the same twice."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._ids = range(100, engine.config.model.vocab_size)
        self._random = random.Random(0)

    async def answer(self, count: int, prompt: int, length: int) -> list[RequestOutput]:
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=length, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompts = [self._random.choices(self._ids, k=prompt) for _ in range(count)]
        requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        return await asyncio.gather(*(self._engine.generate(each, params) for each in requests))


async def all_captured(engine: AsyncLLMEngine) -> None:
    """Wait for the graphs that are captured in idle times."""
    while engine.startup["decode_graphs_to_follow"]:  # noqa: ASYNC110  nobody tells
        await asyncio.sleep(0.05)


async def measure(name: str, case: Case, folder: Path, options: Any) -> dict[str, Any]:
    """Print a line per load; for lat1 and lat8 with the share of `tb_per_s`, by the bytes that a
    step must read."""
    model = write_shape(case.shape, folder / name)
    args = SETTINGS | case.args
    start = time.perf_counter()
    engine = AsyncLLMEngine(str(model), **args)
    steps = DeviceSteps()
    engine.stat_loggers.append(steps)
    async with engine:
        result: dict[str, Any] = {"ready_s": round(time.perf_counter() - start, 1)}
        load = Load(engine)
        await load.answer(1, 16, 4)
        await all_captured(engine)
        result["kv_pages"] = engine.startup["kv_pages"]
        print(f"     {name}: starting took {engine.startup['seconds']}", flush=True)
        for rows in (1, 8):
            num_bytes = bytes_of_step(EngineArgs(str(model), **args), rows, CONTEXT)
            row = await _latency(load, steps, rows, num_bytes, options.tb_per_s)
            result[f"lat{rows}"] = row
            print(f"     {name} lat{rows}: {json.dumps(row)}", flush=True)
        result["tput"] = await _throughput(load, steps)
        print(f"     {name} tput: {json.dumps(result['tput'])}", flush=True)
        if options.profile:
            for rows in (1, 8):
                await _profile(load, name, rows)
            await _profile(load, name, MANY["requests"], MANY["prompt"])
    return result


async def _latency(
    load: Load, steps: DeviceSteps, rows: int, num_bytes: float, tb_per_s: float
) -> dict[str, float | None]:
    await load.answer(rows, PROMPT_TOKENS, 8)
    steps.ms.clear()
    outputs = []
    for _ in range(REPETITIONS):
        outputs += await load.answer(rows, PROMPT_TOKENS, ANSWER_TOKENS + 1)
    each, limit = statistics.median(map(tpot_ms, outputs)), num_bytes / tb_per_s / 1e9
    return {
        "ttft_ms": round(statistics.median(map(ttft_ms, outputs)), 2),
        "tpot_ms": round(each, 3),
        "device_ms": round(statistics.median(steps.ms[rows]), 3) if steps.ms[rows] else None,
        "read_gb": round(num_bytes / 1e9, 3),
        "limit_ms": round(limit, 3),
        "share": round(limit / each, 3),
    }


async def _throughput(load: Load, steps: DeviceSteps) -> dict[str, float | None]:
    count, length = MANY["requests"], MANY["answer"]
    steps.ms.clear()
    start = time.perf_counter()
    outputs = await load.answer(count, MANY["prompt"], length)
    seconds = time.perf_counter() - start
    full = [ms for rows, each in steps.ms.items() if rows > count // 2 for ms in each]
    return {
        "output_tokens_per_s": round(count * length / seconds),
        "ttft_ms": round(statistics.median(map(ttft_ms, outputs)), 1),
        "decode_step_ms": round(statistics.median(full), 2) if full else None,
    }


async def _profile(load: Load, name: str, rows: int, prompt: int = 16) -> None:
    """The kernels that take most of a decode step's time, by CUPTI. What a kernel took is counted
    from the end of the one before: those that begin early only wait until then."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        await load.answer(rows, prompt, PROFILED_TOKENS + 1)
        torch.cuda.synchronize()
    us, calls, last = Counter[str](), Counter[str](), 0.0
    events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
    for event in sorted(events, key=lambda e: e.time_range.end):
        start, end = event.time_range.start, event.time_range.end
        us[event.name] += max(0.0, end - max(start, last))
        calls[event.name] += 1
        last = max(last, end)
    print(
        f"     {name}, {rows} rows of {prompt} tokens: {us.total() / PROFILED_TOKENS:.0f} us of "
        "kernels a token (with the prompts')"
    )
    for kernel, total in us.most_common(NUM_KERNELS):
        count = calls[kernel]
        print(
            f"       {total / PROFILED_TOKENS:8.1f} us {count / PROFILED_TOKENS:7.1f} calls "
            f"{total / count:7.2f} us each  {kernel[:80]}",
            flush=True,
        )


async def measure_memory(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Measure the KV pages that a budget leaves after a start without load, and used memory."""
    model = write_shape(case.shape, folder / name)
    total = torch.cuda.mem_get_info()[1]
    args = SETTINGS | case.args | {"gpu_memory_utilization": BUDGET_BYTES / total}
    start = time.perf_counter()
    async with AsyncLLMEngine(str(model), **args) as engine:
        ready_s = time.perf_counter() - start
        await all_captured(engine)
        free, total = torch.cuda.mem_get_info()
        pages, block_size = engine.startup["kv_pages"], engine.config.block_size
        groups = engine.stats().num_groups
    row = {
        "budget_gib": BUDGET_BYTES / 2**30,
        "kv_pages": pages,
        "tokens": pages // groups * block_size,
        "held_gib": round((total - free) / 2**30, 2),
        "ready_s": round(ready_s, 1),
    }
    print(f"     {name} memory: {json.dumps(row)}", flush=True)
    return {"memory": row}


def measure_http(name: str, case: Case, folder: Path, options: Any) -> dict[str, Any]:
    """The workloads of loadtest.py, against a server of its own."""
    model = write_shape(case.shape, folder / name)
    settings = SETTINGS | case.args | {"tokenizer": options.tokenizer}
    del settings["skip_tokenizer_init"]
    result: dict[str, Any] = {}
    for row in time_http(str(model), options.workloads.split(","), None, settings):
        load = row["workload"]
        found = result[load] = figures(row)
        rows = {"lat1": 1, "lat8": 8}.get(load)
        if rows is not None and "tpot_ms" in found:
            num_bytes = bytes_of_step(EngineArgs(str(model), **SETTINGS | case.args), rows, 256)
            limit = num_bytes / options.tb_per_s / 1e9
            share = round(limit / found["tpot_ms"], 3)
            found |= {"limit_ms": round(limit, 3), "share": share}
        print(f"     {name} {load} over HTTP: {json.dumps(found)}", flush=True)
    return result
