#!/usr/bin/env python3
"""Times single steps of an engine's worker on one CUDA device, kernel by kernel.

    scripts/bench_step.py --model DIR --batch 1,8,64 --context 640 --prefill 128,2048
    ... --layers        decode steps of up to 8 rows by the model's layers, not by the
                        persistent kernel
    ... --quantization fp8 --kv-cache-dtype fp8_e4m3

Decode steps are replays of the captured graphs, as the engine runs them; a prefill step is one
prompt, launched as the engine launches it. Weights are made up. Beside the time stand the bytes
that a decode step must move (weights once, keys and values of all rows) and the share of the
memory bandwidth measured in the same run. Kernel times come from the profiler and may overlap: a
kernel launched ahead is counted while it waits for the one before. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from model_shapes import step_bytes

from asyncllm.config import EngineArgs, EngineConfig
from asyncllm.graphs.decode_graphs import LAYERS
from asyncllm.worker.worker import Worker

REPEATS = 30
PROFILED = 5
BANDWIDTH_BYTES = 4 << 30


def time_ms(work: Callable[[], Any], prepare: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median device time of one call, `prepare` outside it."""
    times = []
    for _ in range(repeats + 2):
        prepare()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def measure_bandwidth() -> float:
    """Bytes per second that a large sum reads. Bulk copies read 7 % more (docs/log/decode.md),
    so a share of it can be above 100 %."""
    source = torch.zeros(BANDWIDTH_BYTES // 4, dtype=torch.float32, device="cuda")
    return BANDWIDTH_BYTES / time_ms(source.sum, lambda: None, 5) * 1e3


def profile_kernels(work: Callable[[], Any], prepare: Callable[[], Any]) -> list[dict[str, Any]]:
    """Kernels of one call by summed time: name, count and microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            prepare()
            torch.cuda.synchronize()
            work()
            torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.profiler.DeviceType.CUDA and "Mem" not in event.name:
            totals[event.name].append(event.device_time)
    rows = [
        {"kernel": name[:90], "count": len(us) // PROFILED, "us": round(sum(us) / PROFILED, 1)}
        for name, us in totals.items()
        if len(us) >= PROFILED
    ]
    return sorted(rows, key=lambda row: -row["us"])


class Bench:
    """One worker, and steps on it at a given context."""

    def __init__(self, config: EngineConfig, context: int) -> None:
        self._worker = Worker(config)
        while self._worker.num_pending_graphs:
            self._worker.capture_graph()
        self._runner = self._worker.runner
        self._state = self._runner._state
        self._context = context
        pages = -(-(context + 1) // config.block_size)
        available = self._worker.memory.num_pages
        for slot in range(1, config.num_slots):  # its own pages, or, too many, another's
            first = 1 + (slot - 1) * pages % (available - pages)
            self._state.block_tables[0, slot, :pages] = torch.arange(first, first + pages)
        self._hf_config = config.model.hf_config
        self._kv_itemsize = getattr(torch, config.kv_cache_dtype).itemsize

    def decode(self, batch: int, bandwidth: float, kernels: bool) -> dict[str, Any]:
        graphs = self._runner.graphs
        assert graphs is not None
        size = graphs.fitting(batch)
        assert size is not None
        graphs.slots.zero_()
        graphs.slots[:batch] = torch.arange(1, batch + 1)

        def prepare() -> None:
            self._state.positions[1:].fill_(self._context - 1)  # the new token is the last seen

        def work() -> None:
            graphs[size].replay()

        ms = time_ms(work, prepare)
        num_bytes = step_bytes(
            self._runner._model, self._hf_config, batch, self._context, self._kv_itemsize
        )
        limit_ms = num_bytes / bandwidth * 1e3
        kernel = next(name for name, sizes in graphs.implementations.items() if batch in sizes)
        return {
            "step": "decode" if kernel == LAYERS else f"decode by {kernel}",
            "batch": batch,
            "context": self._context,
            "ms": round(ms, 4),
            "gigabytes": round(num_bytes / 1e9, 3),
            "limit_ms": round(limit_ms, 4),
            "share": round(limit_ms / ms, 3),
            "kernels": profile_kernels(work, prepare) if kernels else [],
        }

    def prefill(self, tokens: int, kernels: bool) -> dict[str, Any]:
        def work() -> None:
            self._runner.run_padding(tokens)

        ms = time_ms(work, lambda: None, 10)
        rows = profile_kernels(work, lambda: None) if kernels else []
        return {"step": "prefill", "tokens": tokens, "ms": round(ms, 4), "kernels": rows}


def report(row: Mapping[str, Any]) -> None:
    what = f"batch {row['batch']}" if "batch" in row else f"{row['tokens']} tokens"
    limit = ""
    if "batch" in row:
        limit = f"{row['gigabytes']} GB, at least {row['limit_ms']} ms: {row['share']:.0%}"
    kernels = row["kernels"]
    launches, total_us = sum(k["count"] for k in kernels), sum(k["us"] for k in kernels)
    print(f"\n## {row['step']}, {what}: {row['ms']} ms {limit}", flush=True)
    if kernels:
        print(f"{launches} kernels, {total_us:.0f} us in sum")
        print("| kernel | count | us |\n| --- | --- | --- |")
        for kernel in kernels[:16]:
            print(f"| {kernel['kernel']} | {kernel['count']} | {kernel['us']} |")


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--batch", type=sizes, default=[1, 8, 64, 256], help="decode batch sizes")
    parser.add_argument("--context", type=int, default=640, help="tokens that each row sees")
    parser.add_argument("--prefill", type=sizes, default=[], help="tokens of prefill steps")
    parser.add_argument("--layers", action="store_true", help="not by the persistent kernel")
    parser.add_argument("--quantization", help="of weights, as they are made")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--no-kernels", action="store_true", help="only the times of whole steps")
    args = parser.parse_args()
    config = EngineArgs(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=max(args.batch),
        cuda_graph_sizes=args.batch,
        gpu_memory_utilization=0.85,
        swap_space=0,
        # A backend that is named is never exchanged for the persistent kernel.
        attention_backend="flashinfer" if args.layers else "auto",
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    ).create_engine_config()
    with torch.inference_mode():
        bandwidth = measure_bandwidth()
        torch.cuda.empty_cache()
        bench = Bench(config, args.context)
        kernels = not args.no_kernels
        rows = [bench.decode(batch, bandwidth, kernels) for batch in args.batch]
        rows += [bench.prefill(tokens, kernels) for tokens in args.prefill]
    device = torch.cuda.get_device_name()
    print(
        f"# {args.model} on {device}, torch {torch.__version__}: {bandwidth / 1e12:.2f} TB/s read"
    )
    for row in rows:
        report(row)
    summary = [{key: value for key, value in row.items() if key != "kernels"} for row in rows]
    print(json.dumps({"device": device, "bandwidth": round(bandwidth), "steps": summary}))


if __name__ == "__main__":
    main()
