"""The workloads of gpu_check.py: over HTTP, by loadtest.py against a server of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SERVING: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 8192,
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.85,
}
SHUTDOWN_SECONDS = 60  # running answers get 30 of them


def time_http(
    model: str,
    workloads: list[str],
    out: Path | None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """The workloads by scripts/loadtest.py against `asyncllm serve` in a process of its own, with
    these `settings` beside SERVING; each as soon as it is done."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        f"--{k.replace('_', '-')}{'' if v is True else f'={v}'}"
        for k, v in (SERVING | dict(settings or {})).items()
    ]
    command = [sys.executable, "-m", "asyncllm", "serve", model, *flags, f"--port={port}"]
    start = time.perf_counter()
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
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
            if out is not None:
                name = f"{Path(model).name}-{workload}.txt"
                (out / name).write_text(done.stderr[-4000:] + done.stdout)
            yield {"workload": workload, "ready_s": ready_s, "result": result}
    finally:
        end(server)


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """A table's figures from one of `time_http`'s rows: ms, medians and 99th percentiles, and
    tokens per second; or what the load test said instead."""
    report = row["result"]
    if "latency_ms" not in report:
        return {"workload": row["workload"], "failed": report}
    latency = report["latency_ms"]
    ttft, gaps = latency["ttft_from_sent"], latency["itl_per_chunk"]
    return {
        "workload": row["workload"],
        "ready_s": row["ready_s"],
        "ttft_ms": round(ttft["median"], 2),
        "ttft_p99_ms": round(ttft["p99"], 2),
        "tpot_ms": round(latency["tpot"]["median"], 3),
        "itl_p99_ms": round(gaps["p99"], 2),
        "output_tokens_per_s": round(report["output_tokens_per_s"]),
        "total_tokens_per_s": round(report["total_tokens_per_s"]),
    }


def end(server: subprocess.Popen[bytes]) -> None:
    """Let it shut down; one that does not would keep the GPU from what comes next."""
    server.send_signal(signal.SIGINT)
    try:
        server.wait(timeout=SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"the server did not end within {SHUTDOWN_SECONDS} s", file=sys.stderr, flush=True)
        server.kill()
        server.wait()


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
