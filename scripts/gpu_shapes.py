#!/usr/bin/env python3
"""Checks and times models of published shapes, with made-up weights, on one CUDA device.

    scripts/gpu_shapes.py                     lists the shapes
    scripts/gpu_shapes.py --checks NAME ...   fast paths against slow ones, on a few layers of each
    scripts/gpu_shapes.py --http lat1,lat8,tput NAME ...   the workloads over HTTP, with the share
        of the bytes that a decode step must read

Made-up weights have near ties everywhere: two answers agree when they are the same up to a token at
which both wanted the other's too, within TIE. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_timing
import torch
from gpu_questions import EAGER, ROOMY, Args
from model_shapes import SHAPES, bytes_of_step, cut, write_shape

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from asyncllm.engine.text.prompt import TokensPrompt

TIGHT = ROOMY | {"num_gpu_blocks_override": 60}  # all prompts and answers need 200 or more
TIE = 0.25  # of two log-probabilities in bf16, whose sums another path adds in another order
PROMPTS = [
    [(7 * place + 13 * i) % 5000 + 100 for i in range(20 + 22 * place)] for place in range(12)
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5, detokenize=False)
CHECKS: list[tuple[str, Args]] = [  # each beside ROOMY
    ("graph = eager", EAGER),
    ("one ahead = synchronous", ROOMY | {"async_scheduling": False}),
    ("swapped = never preempted", TIGHT | {"preemption_mode": "swap"}),
    ("recomputed = never preempted", TIGHT | {"preemption_mode": "recompute"}),
]


async def answer(model: Path, args: Args, times: int = 1) -> list[list[RequestOutput]]:
    """All prompts at once, `times` times over one engine."""
    settings: Args = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 320}
    settings |= {"cuda_graph_sizes": [1, 2, 4, 8, 12], "prefill_graph_sizes": [64, 256]}
    async with AsyncLLMEngine(str(model), **settings | args) as engine:
        answers = []
        for _ in range(times):
            requests = [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS]
            answers.append(
                await asyncio.gather(*(engine.generate(each, GREEDY) for each in requests))
            )
        engine.check_idle()
        stats = engine.stats()
    preemptions = stats.num_preemptions_swap + stats.num_preemptions_recompute
    if "preemption_mode" in args and not preemptions:
        raise RuntimeError(f"nothing was preempted with {args}")
    return answers


def compare(ours: list[RequestOutput], oracle: list[RequestOutput]) -> tuple[bool, str]:
    """Whether all agree; how many are equal to the end, and the widest gap where others diverge."""
    gaps = [gap_at_parting(*pair) for pair in zip(ours, oracle, strict=True)]
    diverged = [gap for gap in gaps if gap is not None]
    detail = f"{len(gaps) - len(diverged)}/{len(gaps)} equal"
    if diverged:
        detail += f", the others diverge where log-probabilities are {max(diverged):.3f} apart"
    return all(gap <= TIE for gap in diverged), detail


def gap_at_parting(a: RequestOutput, b: RequestOutput) -> float | None:
    """By how much, at the first token that differs, each prefers its own to the other's at most."""
    x, y = a.outputs[0], b.outputs[0]
    pairs = enumerate(zip(x.token_ids, y.token_ids, strict=True))
    at, (own, other) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (-1, (0, 0)))
    if at < 0:
        return None
    assert x.logprobs is not None and y.logprobs is not None
    gap = 0.0
    for row, chosen, passed in ((x.logprobs[at], own, other), (y.logprobs[at], other, own)):
        if passed not in row:
            return math.inf
        gap = max(gap, row[chosen].logprob - row[passed].logprob)
    return gap


async def check_shape(name: str, folder: Path) -> int:
    """Print each check; how many failed."""
    model = write_shape(cut(SHAPES[name]), folder / f"{name}-cut")
    failed = 0

    def report(title: str, ok: bool, detail: str) -> None:
        nonlocal failed
        failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {title}: {detail}", flush=True)

    plain, warm = await answer(model, ROOMY, times=2)
    ok, detail = compare(warm, plain)
    hits = sum(output.num_cached_tokens for output in warm)
    report("cached = cold", ok and hits > 0, f"{detail}, {hits} tokens hit")
    for title, args in CHECKS:
        (other,) = await answer(model, args)
        report(title, *compare(plain, other))
    return failed


def time_shape(name: str, folder: Path, options: argparse.Namespace) -> None:
    model, workloads = write_shape(SHAPES[name], folder / name), options.http.split(",")
    gpu_timing.SERVING |= {"tokenizer": options.tokenizer, "gpu_memory_utilization": 0.92}
    for row in gpu_timing.time_http(str(model), workloads, None):
        result = row["result"]
        if "latency_ms" not in result:
            print(json.dumps(row)[:600], flush=True)
            continue
        latency = result["latency_ms"]
        line: dict[str, Any] = {"shape": name, "load": row["workload"], "ready_s": row["ready_s"]}
        line["ttft_ms"] = round(latency["ttft_from_sent"]["median"], 2)
        line["tpot_ms"] = round(latency["tpot"]["median"], 3)
        line["output_tokens_per_s"] = round(result["output_tokens_per_s"])
        rows = {"lat1": 1, "lat8": 8}.get(row["workload"])
        if rows is not None:
            limit = bytes_of_step(model, rows, context=256) / options.tb_per_s / 1e9
            line |= {"limit_ms": round(limit, 3), "share": round(limit / line["tpot_ms"], 3)}
        print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--http", default="", help="workloads of loadtest.py, by commas")
    parser.add_argument("--tokenizer", help="a folder's, for the workloads")
    parser.add_argument("--tb-per-s", type=float, default=3.05, help="what the device can read")
    args = parser.parse_args()
    if not args.names:
        print("\n".join(SHAPES))
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names:
            if args.checks:
                failed += asyncio.run(check_shape(name, Path(folder)))
                torch.cuda.empty_cache()
            if args.http:
                time_shape(name, Path(folder), args)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
