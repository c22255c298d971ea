#!/usr/bin/env python3
"""Checks and times asyncllm on one CUDA device, in one call, and prints Markdown for docs/LOG.md.

    scripts/gpu_check.py                         the correctness checks, on the built-in model
    scripts/gpu_check.py --model DIR [DIR ...]   and the workloads on these, with made-up weights
    ... --http                                   the workloads over HTTP too, by scripts/loadtest.py

Every fast path against its oracle: graph = eager, one step ahead = synchronous, cached = cold,
swapped and recomputed = never preempted, batched = alone, FlashInfer = torch.
Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_timing import WORKLOADS, time_engine, time_http

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams

LOGPROB_TOLERANCE = 0.15  # bf16 activations, other reduction orders
LEAK_TOLERANCE_BYTES = 32 << 20
ROOMY: dict[str, Any] = {
    "num_gpu_blocks_override": 2000,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "swap_space": 0.2,
    "dtype": "bfloat16",
}
TIGHT: dict[str, Any] = ROOMY | {"num_gpu_blocks_override": 24}  # the questions need about 60
QUESTIONS = [
    *(f"What is {a} + {b}?" for a, b in ((12, 30), (7, 8), (25, 41), (3, 96))),
    *(f"What is the capital of {c}?" for c in ("France", "Japan", "Peru", "Kenya")),
    *(f"Spell the word {w}." for w in ("banana", "window", "guitar")),
    *(f"Tell me a story about a {a}." for a in ("fox", "bear", "owl")),
    "Count from 3 to 17.",
    "How many metres are 3 kilometres?",
]


@dataclass
class Answers:
    tokens: list[list[int]]
    outputs: list[RequestOutput]
    stats: Any


async def answer(params: list[SamplingParams], one_by_one: bool = False, **args: Any) -> Answers:
    """The built-in model's answers to QUESTIONS, all at once unless `one_by_one`."""
    async with AsyncLLMEngine("tiny", **args) as engine:
        prompts = [[{"role": "user", "content": q}] for q in QUESTIONS]
        calls = [engine.generate(p, params[i % len(params)]) for i, p in enumerate(prompts)]
        if one_by_one:
            outputs = [await call for call in calls]
        else:
            outputs = list(await asyncio.gather(*calls))
        engine.check_idle()
        return Answers([o.outputs[0].token_ids for o in outputs], outputs, engine.stats())


async def answer_twice(params: list[SamplingParams], **args: Any) -> tuple[Answers, Answers]:
    """Cold, then with every prompt in the prefix cache."""
    async with AsyncLLMEngine("tiny", **args) as engine:
        rounds = []
        for _ in range(2):
            # Long prompts: a short one has no full page to share.
            prompts = [
                [{"role": "user", "content": f"{QUESTIONS[-1]} {q} " * 6}] for q in QUESTIONS
            ]
            outputs = list(
                await asyncio.gather(
                    *(engine.generate(p, params[i % len(params)]) for i, p in enumerate(prompts))
                )
            )
            rounds.append(
                Answers([o.outputs[0].token_ids for o in outputs], outputs, engine.stats())
            )
        return rounds[0], rounds[1]


def equal(ours: Answers, oracle: Answers) -> tuple[bool, str]:
    same = sum(a == b for a, b in zip(ours.tokens, oracle.tokens, strict=True))
    return same == len(oracle.tokens), f"{same}/{len(oracle.tokens)} answers equal"


def prompt_logprob_gap(ours: Answers, reference: Answers) -> float:
    """Largest difference of any prompt token's logprob."""
    gaps = [0.0]
    for a, b in zip(ours.outputs, reference.outputs, strict=True):
        assert a.prompt_logprobs is not None and b.prompt_logprobs is not None
        for token, x, y in zip(
            a.prompt_token_ids, a.prompt_logprobs, b.prompt_logprobs, strict=True
        ):
            if x is not None and y is not None:
                gaps.append(abs(x[token].logprob - y[token].logprob))
    return max(gaps)


@contextmanager
def synchronisation_forbidden() -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


async def check_all() -> list[tuple[str, bool, str]]:
    greedy = [SamplingParams(temperature=0, max_tokens=64)]
    sampled = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=48),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=4, max_tokens=48),
        SamplingParams(
            temperature=0, repetition_penalty=1.2, presence_penalty=0.5, logprobs=3, max_tokens=48
        ),
        SamplingParams(
            temperature=0.7,
            seed=5,
            allowed_token_ids=list(range(100, 900)),
            logit_bias={101: 5.0},
            min_tokens=3,
            max_tokens=48,
        ),
    ]
    with_logprobs = [SamplingParams(temperature=0, max_tokens=64, prompt_logprobs=0)]
    rows: list[tuple[str, bool, str]] = []

    async def check(name: str, work: Callable[[], Coroutine[Any, Any, tuple[bool, str]]]) -> None:
        try:
            ok, detail = await work()
        except Exception as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
        rows.append((name, ok, detail.replace("\n", " ")[:300]))
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", file=sys.stderr, flush=True)

    base = await answer(greedy, **ROOMY)
    eager = ROOMY | {"enforce_eager": True}

    async def compare(
        params: list[SamplingParams], ours: dict[str, Any], oracle: dict[str, Any]
    ) -> tuple[bool, str]:
        return equal(await answer(params, **ours), await answer(params, **oracle))

    await check("graph = eager, greedy", lambda: compare(greedy, ROOMY, eager))
    await check("graph = eager, sampled", lambda: compare(sampled, ROOMY, eager))
    await check(
        "one ahead = synchronous",
        lambda: compare(sampled, ROOMY, ROOMY | {"async_scheduling": False}),
    )

    async def cached() -> tuple[bool, str]:
        cold, warm = await answer_twice(greedy, **ROOMY)
        hits = sum(o.num_cached_tokens for o in warm.outputs)
        ok, detail = equal(warm, cold)
        return ok and hits > 0, f"{detail}, {hits} prompt tokens from the cache"

    await check("cached = cold", cached)

    async def preempted(mode: str) -> tuple[bool, str]:
        ours = await answer(greedy, **TIGHT, preemption_mode=mode)
        counts = ours.stats.num_preemptions_swap, ours.stats.num_preemptions_recompute
        ok, detail = equal(ours, base)
        return ok and sum(counts) > 0, f"{detail}, {counts[0]} swaps, {counts[1]} recomputations"

    await check("swapped = never preempted", lambda: preempted("swap"))
    await check("recomputed = never preempted", lambda: preempted("recompute"))

    async def alone() -> tuple[bool, str]:
        return equal(base, await answer(greedy, one_by_one=True, **ROOMY))

    await check("batched = alone", alone)

    async def backend(name: str, **args: Any) -> tuple[bool, str]:
        torch_args = {"attention_backend": "torch", "enforce_eager": True}
        reference = await answer(with_logprobs, **ROOMY | torch_args)
        ours = await answer(with_logprobs, **ROOMY | {"attention_backend": name} | args)
        gap = prompt_logprob_gap(ours, reference)
        ok, detail = equal(ours, reference)
        return (
            ok and gap < LOGPROB_TOLERANCE,
            f"{detail}, prompt logprobs differ by at most {gap:.3f}",
        )

    await check("FlashInfer = torch", lambda: backend("flashinfer"))
    await check("flash-attn = torch", lambda: backend("flash_attn", block_size=256))

    async def no_sync() -> tuple[bool, str]:
        async with AsyncLLMEngine("tiny", **ROOMY) as engine:
            await engine.generate("warm", SamplingParams(max_tokens=4))
            with synchronisation_forbidden():
                await asyncio.gather(
                    *(engine.generate(q, sampled[i % 4]) for i, q in enumerate(QUESTIONS))
                )
            engine.check_idle()
        return True, "torch.cuda.set_sync_debug_mode('error') around a sampled batch"

    await check("no hidden synchronisation", no_sync)

    async def no_leak() -> tuple[bool, str]:
        left = []
        for _ in range(3):
            await answer(greedy, **ROOMY)
            gc.collect()
            torch.cuda.empty_cache()
            left.append((torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()))
        lost = left[0][0] - left[-1][0]
        history = ", ".join(f"{free >> 20} free {used >> 20} held" for free, used in left)
        return lost < LEAK_TOLERANCE_BYTES, f"{lost >> 20} MiB lost over three engines ({history})"

    await check("no leak", no_leak)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="*", default=[], help="folders to time")
    parser.add_argument("--http", action="store_true", help="time over HTTP as well")
    parser.add_argument("--http-workloads", default="lat1,lat8,tput")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for full results")
    args = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    print(f"\n{properties.name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    failed = 0
    if not args.no_checks:
        rows = asyncio.run(check_all())
        failed = sum(not ok for _, ok, _ in rows)
        print("| check | result | detail |\n| --- | --- | --- |")
        for name, ok, detail in rows:
            print(f"| {name} | {'ok' if ok else 'FAILED'} | {detail} |")
    for model in args.model:
        print(f"\n{Path(model).name}, engine alone, dummy weights:\n", flush=True)
        for row in asyncio.run(time_engine(model, WORKLOADS)):
            print(json.dumps(row), flush=True)
        if args.http:
            print(f"\n{Path(model).name}, over HTTP:\n", flush=True)
            for row in time_http(model, args.http_workloads.split(","), args.out):
                print(json.dumps(row)[:1500], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
