"""The workloads of gpu_check.py: through the engine alone, and over HTTP by loadtest.py."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Workload:
    name: str
    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int


WORKLOADS = [
    Workload("lat1", 8, 128, 256, 1),
    Workload("lat8", 32, 128, 256, 8),
    Workload("tput", 768, 512, 256, 256),
]
SERVING: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 8192,
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.85,
}


async def time_engine(model: str, workloads: list[Workload]) -> list[dict[str, Any]]:
    """The workloads through `engine.generate`, without HTTP."""
    start = time.perf_counter()
    async with AsyncLLMEngine(model, **SERVING) as engine:
        print(json.dumps(engine.startup), file=sys.stderr, flush=True)
        startup_s = time.perf_counter() - start
        rows = []
        for workload in workloads:
            await run_workload(engine, Workload("warm-up", 4, 64, 8, 4), seed=1)
            rows.append(await run_workload(engine, workload, seed=2))
            rows[-1]["startup_s"] = round(startup_s, 2)
        engine.check_idle()
    return rows


async def run_workload(engine: AsyncLLMEngine, workload: Workload, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=True)
    room = asyncio.Semaphore(workload.concurrency)

    async def one(ids: list[int]) -> RequestOutput:
        async with room:
            return await engine.generate({"prompt_token_ids": ids}, params)

    prompts = [
        [rng.randrange(1000, 30000) for _ in range(workload.input_len)]
        for _ in range(workload.num_prompts)
    ]
    start = time.perf_counter()
    outputs = await asyncio.gather(*(one(ids) for ids in prompts))
    seconds = time.perf_counter() - start
    ttft, tpot = [], []
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None and metrics.first_token_time and metrics.last_token_time
        ttft.append(metrics.first_token_time - metrics.arrival_time)
        seconds_after_first = metrics.last_token_time - metrics.first_token_time
        tpot.append(seconds_after_first / (workload.output_len - 1))
    return {
        "workload": workload.name,
        "ttft_median_ms": round(statistics.median(ttft) * 1e3, 2),
        "tpot_median_ms": round(statistics.median(tpot) * 1e3, 3),
        "output_tokens_per_s": round(workload.num_prompts * workload.output_len / seconds, 1),
    }


def time_http(model: str, workloads: list[str], out: Path | None) -> list[dict[str, Any]]:
    """The workloads by scripts/loadtest.py against `asyncllm serve` in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SERVING.items()]
    command = [sys.executable, "-m", "asyncllm", "serve", model, *flags, f"--port={port}"]
    start = time.perf_counter()
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    rows = []
    try:
        wait_until_healthy(url, server)
        ready_s = round(time.perf_counter() - start, 2)
        loadtest = Path(__file__).with_name("loadtest.py")
        for seed, workload in enumerate(workloads):
            # A seed of its own: no workload may find the prompts of another in the cache.
            load = ["--base-url", url, "--workload", workload, "--seed", str(100 + seed)]
            run = [sys.executable, str(loadtest), *load]
            done = subprocess.run(run, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                print(done.stderr[-2000:], file=sys.stderr, flush=True)
            lines = done.stdout.strip().splitlines()
            result = json.loads(lines[-1]) if lines else {"error": done.stderr[-500:]}
            rows.append({"workload": workload, "ready_s": ready_s, "result": result})
            if out is not None:
                name = f"{Path(model).name}-{workload}.txt"
                (out / name).write_text(done.stderr[-4000:] + done.stdout)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
    return rows


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer_:
                if answer_.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.05)
    raise RuntimeError("the server was not healthy within 120 s")
