#!/usr/bin/env python3
"""Tokens/s and TPOT of a model with LoRA adapters beside none: random adapters, in process.

    scripts/bench_lora.py MODEL --load-format dummy
    ... --cases off 0x16 8x16      adapters x rank; off: without the flag; 0: with it, none in use

64 streams by default, spread over the adapters in turn, each case twice, of which the better one
counts. Cases of one rank run in one engine with 8 slots, or as many as a case needs. The adapters'
files are the same, but not their slots, so nothing is read once for several. `gap`: the longest
wait for a token of streams that run, in ms, from the moment another request comes until 0.3 s
after its answer: without an adapter, and with one that is loaded for it. `load_read_gap_ms` is that
until its files are read, in `read_ms`, so what is longer is copied or launched; `loop_ms` is the
longest delay of a timer of the event loop, so what is longer waits for the device. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncllm import AsyncLLMEngine, LoRARequest, SamplingParams
from asyncllm.model_config import ModelConfig

CASES = ["off", "0x16", "1x16", "8x16", "32x16", "8x64"]
PROMPT_TOKENS = 128
LEAST_SLOTS = 8
SETTLING_S = 0.3
TICK_S = 0.002
Results = dict[str, dict[str, float]]


def write_adapter(config: ModelConfig, folder: Path, rank: int) -> Path:
    """A random adapter of all seven projections of every layer."""
    hf, generator = config.hf_config, torch.Generator().manual_seed(0)
    heads, kv_heads = (n * config.head_dim for n in (hf.num_attention_heads, config.num_kv_heads))
    hidden, wide = hf.hidden_size, hf.intermediate_size
    shapes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    tensors = {}
    for layer in range(config.num_layers):
        for module, (size_in, size_out) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("A", (rank, size_in)), ("B", (size_out, rank))):
                weights = torch.empty(shape, dtype=torch.bfloat16)
                weights.uniform_(-0.01, 0.01, generator=generator)
                tensors[f"{name}.lora_{part}.weight"] = weights
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": rank}))
    return folder


class Streams:
    """Streams of one engine, spread over adapters in turn, and when each had its tokens."""

    def __init__(self, engine: AsyncLLMEngine, loras: Sequence[LoRARequest], num: int) -> None:
        self._engine, self._loras = engine, loras
        self.times: list[list[float]] = [[] for _ in range(num)]

    async def run(self, num_tokens: int, seed: int) -> None:
        rng = random.Random(seed)
        vocab = self._engine.config.model.vocab_size
        prompts = [[rng.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in self.times]
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )

        async def stream(index: int) -> None:
            lora = self._loras[index % len(self._loras)] if self._loras else None
            async for _ in self._engine.generate(prompts[index], params, lora_request=lora):
                self.times[index].append(time.perf_counter())

        await asyncio.gather(*map(stream, range(len(self.times))))

    def gaps(self, since: float = 0.0, until: float = math.inf) -> Iterator[float]:
        """Those that end after `since` and begin before `until`."""
        for times in self.times:
            for before, after in itertools.pairwise(times):
                if after > since and before < until:
                    yield after - before


async def measure(
    engine: AsyncLLMEngine, loras: Sequence[LoRARequest], args: argparse.Namespace, seed: int
) -> dict[str, float]:
    """All streams at once. TPOT: the mean of a stream, over all streams, in ms."""
    streams = Streams(engine, loras, args.streams)
    start = time.perf_counter()
    await streams.run(args.tokens, seed)
    seconds = time.perf_counter() - start
    gaps = list(streams.gaps())
    return {
        "tokens_per_s": round(args.streams * args.tokens / seconds, 1),
        "tpot_ms": round(sum(gaps) / len(gaps) * 1e3, 3),
    }


async def tick(delays: list[float]) -> None:
    """Note how late the loop calls back, until cancelled."""
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        delays.append(time.perf_counter() - due)


async def gap_ms(
    engine: AsyncLLMEngine,
    loras: Sequence[LoRARequest],
    args: argparse.Namespace,
    fresh: LoRARequest | None,
) -> dict[str, float]:
    """The longest gaps of running streams when a request for `fresh` comes, which is not loaded."""
    streams = Streams(engine, loras, args.streams - 1)
    running = asyncio.create_task(streams.run(args.gap_tokens, 0))
    while min(map(len, streams.times)) < 5:  # noqa: ASYNC110 (streams that run)
        await asyncio.sleep(0.01)
    delays: list[float] = []
    ticking = asyncio.create_task(tick(delays))
    start = time.perf_counter()
    if fresh is not None:
        await engine.add_lora(fresh)
    is_read = time.perf_counter()
    one = SamplingParams(max_tokens=1, detokenize=False)
    await engine.generate([5] * 16, one, lora_request=fresh)
    await asyncio.sleep(SETTLING_S)
    for task in (running, ticking):
        task.cancel()
    await asyncio.gather(running, ticking, return_exceptions=True)
    found = {"gap_ms": max(streams.gaps(start)), "loop_ms": max(delays)}
    if fresh is not None:
        found["read_gap_ms"] = max(streams.gaps(start, is_read))
        found["read_ms"] = is_read - start
    return {name: round(seconds * 1e3, 2) for name, seconds in found.items()}


async def run_engine(
    args: argparse.Namespace, folder: Path, names: Sequence[str], results: Results
) -> dict[str, float]:
    """Cases of one engine. Returns its gaps, where a case has several adapters."""
    settings: dict[str, Any] = {
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": args.streams,
    }
    counts, rank = dict.fromkeys(names, 0), 0
    if names != ["off"]:
        counts = {name: int(name.partition("x")[0]) for name in names}
        rank = int(names[0].partition("x")[2])
        slots = max(LEAST_SLOTS, *counts.values(), 1)
        settings |= {"enable_lora": True, "max_loras": slots, "max_lora_rank": rank}
    async with AsyncLLMEngine(args.model, **settings) as engine:
        loras = []
        if most := max(counts.values()):
            files = write_adapter(engine.config.model, folder / "-".join(names), rank)
            loras = [LoRARequest(f"a{i}", i + 1, files) for i in range(most)]
        seeds = itertools.count(1)  # no prompt twice: adapters of equal files share cached pages
        for name, count in counts.items():
            await Streams(engine, loras[:count], args.streams).run(4, 0)  # reads the files
            found = [await measure(engine, loras[:count], args, next(seeds)) for _ in range(2)]
            results[name] = max(found, key=lambda each: each["tokens_per_s"])
            print(f"{name:>6} {json.dumps(results[name])}", flush=True)
        if most < 2:
            return {}
        gaps = await gap_ms(engine, loras[1:], args, None)
        fresh = LoRARequest("fresh", 0, files)  # the one that nobody uses gives up its slot
        loaded = await gap_ms(engine, loras[1:], args, fresh)
        gaps |= {f"load_{name}": value for name, value in loaded.items()}
        print(f"{names[-1]:>6} {json.dumps(gaps)}", flush=True)
        return gaps


def engines(cases: Sequence[str]) -> list[list[str]]:
    """The cases that share one: `off` alone, others of one rank that need as many slots."""
    groups: dict[tuple[str, int], list[str]] = {}
    for case in cases:
        count, _, rank = case.partition("x")
        slots = 0 if case == "off" else max(LEAST_SLOTS, int(count))
        groups.setdefault((rank, slots), []).append(case)
    return list(groups.values())


async def run(args: argparse.Namespace) -> dict[str, Any]:
    results: Results = {}
    gaps: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="asyncllm-lora-") as folder:
        for names in engines(args.cases):
            found = await run_engine(args, Path(folder), names, results)
            if found:
                gaps[names[-1]] = found
    return {"cases": results, "gaps": gaps}


def print_table(found: dict[str, Any]) -> None:
    cases, gaps = found["cases"], found["gaps"]
    first = next(iter(cases.values()))["tokens_per_s"]
    print(f"\n{'':>6} {'tokens/s':>9} {'change':>8} {'TPOT ms':>8} {'gap ms':>7} {'at a load':>9}")
    for name, case in cases.items():
        rate = case["tokens_per_s"]
        line = f"{name:>6} {rate:9.1f} {rate / first - 1:8.1%} {case['tpot_ms']:8.3f}"
        if name in gaps:
            line += f" {gaps[name]['gap_ms']:7.2f} {gaps[name]['load_gap_ms']:9.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--gap-tokens", type=int, default=1500, help="of streams at a load")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = asyncio.run(run(args))
    print_table(found)
    print(json.dumps({"model": args.model, "device": device, "streams": args.streams, **found}))


if __name__ == "__main__":
    main()
