#!/usr/bin/env python3
"""Times the forward pass of steps with prefills, from graphs and eager, on one CUDA device.

    scripts/bench_prefill.py DIR [DIR ...]

With made-up weights. Per number of tokens: microseconds until the host has launched it, and on the
device alone. Rows: one prompt , and
beside it decodes of 1000 tokens of context.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from asyncllm.attention.base import PrefillRows
from asyncllm.engine_args import EngineArgs
from asyncllm.worker.packed_step import StepTokens
from asyncllm.worker.worker import Worker

SIZES = (16, 64, 128, 256, 512, 1024, 2048)
CONTEXT = 1000  # of each decode
REPEATS = 10
SLEEP_CYCLES = 60_000_000  # about 30 ms: all launches are queued before the first kernel runs


def time_step(worker: Worker, num_tokens: int, num_decodes: int) -> tuple[float, float]:
    """Host and device microseconds of a step of so many tokens, the decodes included."""
    mixed = worker.runner.mixed
    num_prefill = num_tokens - num_decodes
    num_pages = -(-num_prefill // 16)
    worker.runner._state.positions[1 : num_decodes + 1] = CONTEXT
    position = np.arange(num_prefill, dtype=np.int32)
    step = StepTokens(
        decode_slots=np.arange(1, num_decodes + 1, dtype=np.int32),
        decode_positions=np.full(num_decodes, CONTEXT, np.int32),
        tokens=np.stack((position, position, position)),
        write_slots=position + 16,
        samples=np.zeros((3, 0), np.int32),
        prefills=PrefillRows(
            np.array([0, num_prefill], np.int32),
            np.array([num_prefill], np.int32),
            np.array([0, num_pages], np.int32),
            np.arange(1, num_pages + 1, dtype=np.int32),
        ),
    )
    host, device = [], []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        began = time.perf_counter()
        mixed.forward(step, mixed.graph_shape(step))
        host.append((time.perf_counter() - began) * 1e6)
        end.record()
        end.synchronize()
        device.append(start.elapsed_time(end) * 1e3)
    return float(np.median(host)), float(np.median(device))


@torch.inference_mode()
def bench(model: str) -> None:
    before = torch.cuda.mem_get_info()[0]
    args = EngineArgs(
        model, load_format="dummy", max_model_len=8192, gpu_memory_utilization=0.85, swap_space=0
    )
    worker = Worker(args.create_engine_config())
    print(f"\n{Path(model).name}: {json.dumps({k: round(v, 2) for k, v in worker.phases.items()})}")
    print(f"{(before - torch.cuda.mem_get_info()[0]) >> 20} MiB in all")
    print("| tokens | decodes | eager: host, device us | graphs: host, device us |")
    print("| --- | --- | --- | --- |")
    mixed = worker.runner.mixed
    graphs = mixed.graphs
    with torch.cuda.stream(torch.cuda.Stream()):
        for num_tokens in SIZES:
            for num_decodes in (0, 8, 64):
                if num_decodes >= num_tokens:
                    continue
                cells = []
                for mixed.graphs in (None, graphs):
                    host, device = time_step(worker, num_tokens, num_decodes)
                    cells.append(f"{host:.0f}, {device:.0f}")
                print(f"| {num_tokens} | {num_decodes} | {cells[0]} | {cells[1]} |", flush=True)
    del graphs, mixed
    worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="folders")
    for model in parser.parse_args().models:
        bench(model)


if __name__ == "__main__":
    main()
