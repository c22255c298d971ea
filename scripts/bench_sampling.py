#!/usr/bin/env python3
"""Times the sampler's two kernels as a captured step runs them, on one CUDA device.

    scripts/bench_sampling.py --rows 1,8,64,256 --vocab 151936

By kind of row, plain first, and by kind of distribution: `sure` of its token, `peaked`, `open`
(hundreds are likely) and `flat`, which no trained model's is at a usual temperature. Logits are
bfloat16 and, as behind a step's last product, partly in the cache. Least time: reading them once
at the bandwidth of a large copy. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from asyncllm.worker.device_state import DeviceState

KINDS: dict[str, dict[str, float]] = {  # by DeviceState's names
    "plain": {"temperatures": 0.6, "top_ps": 1.0},
    "top_p 0.9": {"temperatures": 0.6, "top_ps": 0.9},
    "top_k 20, top_p 0.95": {"temperatures": 0.6, "top_ks": 20, "top_ps": 0.95},
    "min_p 0.05": {"temperatures": 1.0, "top_ps": 1.0, "min_ps": 0.05},
}
REPLAYS = 50
COPY_BYTES = 2 << 30


def make_logits(distribution: str, rows: int, vocab: int) -> torch.Tensor:
    """bfloat16 [rows, vocab]."""
    logits = torch.randn(rows, vocab, device="cuda") * 2.5 + 2
    if distribution == "flat":
        logits = logits / 5
    else:
        count, scale, floor = {
            "sure": (5, 0.5, 15),
            "peaked": (30, 3, 14),
            "open": (2000, 1.5, 11),
        }[distribution]
        places = torch.rand_like(logits).topk(count, dim=1).indices
        raised = torch.empty(rows, count, device="cuda").exponential_() * scale + floor
        if distribution == "sure":
            raised[:, 0] = 25
        logits.scatter_(1, places, raised)
    return logits.bfloat16()


def time_us(work: Callable[[], Any]) -> float:
    """Median of a graph's replays."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def sample(kind: str, logits: torch.Tensor) -> Callable[[], torch.Tensor]:
    from asyncllm.kernels.sampling.kernel import sample_slots_triton

    rows, vocab = logits.shape
    state = DeviceState(rows + 1, 1, vocab, logits.device)
    for name, value in KINDS[kind].items():
        getattr(state, name).fill_(value)
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=logits.device)
    return lambda: sample_slots_triton(state, logits, slots, slots, None)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64, 256], help="rows of a step")
    parser.add_argument("--vocab", type=int, default=151936, help="size of the vocabulary")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy_us = time_us(torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda").clone)
    bandwidth = 2 * COPY_BYTES / copy_us * 1e6
    device = torch.cuda.get_device_name()
    print(f"# {device}, torch {torch.__version__}: {bandwidth / 1e12:.2f} TB/s copied")
    measured = []
    for rows in args.rows:
        least = rows * args.vocab * 2 / bandwidth * 1e6
        print(f"\n{rows} rows of {args.vocab}, at least {least:.1f} us from memory")
        for distribution in ("sure", "peaked", "open", "flat"):
            logits = make_logits(distribution, rows, args.vocab)
            times = {kind: round(time_us(sample(kind, logits)), 1) for kind in KINDS}
            print(
                f"  {distribution:7}", *(f"{kind}: {us} us" for kind, us in times.items()), sep="  "
            )
            measured.append({"rows": rows, "distribution": distribution, "us": times})
    print(json.dumps({"device": device, "bandwidth": round(bandwidth), "sampling": measured}))


if __name__ == "__main__":
    main()
