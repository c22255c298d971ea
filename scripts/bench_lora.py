"""Tokens/s and TPOT of a model with LoRA adapters beside none: random adapters, in process.

    python scripts/bench_lora.py MODEL --load-format dummy --rank 16 --adapters 0 1 8 32

64 streams by default, spread over the adapters in turn; 0 adapters: the base model, with the flag
on. `--off` measures an engine without the flag first. The adapters' files are the same, but not
their slots. `load gap`: the longest wait for a token, in ms, in the 0.3 s after an adapter is
loaded and first used beside the streams; and the same after a request without one. One JSON line
at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncllm import AsyncLLMEngine, LoRARequest, SamplingParams
from asyncllm.model_config import ModelConfig

PROMPT_TOKENS = 128


def write_adapter(config: ModelConfig, folder: Path, rank: int, seed: int) -> Path:
    """A random adapter of all seven projections of every layer."""
    hf, generator = config.hf_config, torch.Generator().manual_seed(seed)
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


async def measure(
    engine: AsyncLLMEngine, loras: list[LoRARequest], streams: int, num_tokens: int, seed: int
) -> dict[str, float]:
    """All streams at once. TPOT: the mean of a stream, over all streams, in ms."""
    rng = random.Random(seed)
    vocab = engine.config.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    tpots: list[float] = []
    longest_gap = 0.0

    async def stream(index: int) -> None:
        nonlocal longest_gap
        prompt = [rng.randrange(vocab) for _ in range(PROMPT_TOKENS)]
        lora = loras[index % len(loras)] if loras else None
        times = [
            time.perf_counter() async for _ in engine.generate(prompt, params, lora_request=lora)
        ]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        tpots.append(sum(gaps) / len(gaps))
        longest_gap = max(longest_gap, *gaps)

    start = time.perf_counter()
    await asyncio.gather(*map(stream, range(streams)))
    seconds = time.perf_counter() - start
    return {
        "tokens_per_s": round(streams * num_tokens / seconds, 1),
        "tpot_ms": round(sum(tpots) / len(tpots) * 1e3, 3),
        "longest_gap_ms": round(longest_gap * 1e3, 2),
    }


async def load_gap(
    engine: AsyncLLMEngine, loras: list[LoRARequest], streams: int, fresh: LoRARequest | None
) -> float:
    """In ms, of streams that run when another request comes, with an adapter to be loaded."""
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)
    times: list[list[float]] = [[] for _ in range(streams)]

    async def stream(index: int) -> None:
        async for _ in engine.generate(
            [7 + index] * 16, params, lora_request=loras[index % len(loras)]
        ):
            times[index].append(time.perf_counter())

    tasks = [asyncio.create_task(stream(index)) for index in range(streams)]
    while min(map(len, times)) < 20:  # noqa: ASYNC110 (streams that run)
        await asyncio.sleep(0.01)
    start = time.perf_counter()
    one = SamplingParams(max_tokens=1, detokenize=False)
    if fresh is not None:
        await engine.add_lora(fresh)
    await engine.generate([5] * 16, one, lora_request=fresh)
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return round(max(after - before for each in times for before, after in itertools.pairwise(each)
                     if after > start) * 1e3, 2)  # fmt: skip


async def run(args: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="asyncllm-lora-"))
    settings: dict[str, Any] = {
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": args.streams,
    }
    results: dict[str, Any] = {}

    async def rounds(engine: AsyncLLMEngine, name: str, loras: list[LoRARequest]) -> None:
        await measure(engine, loras, args.streams, 4, 0)
        found = [await measure(engine, loras, args.streams, args.tokens, seed) for seed in (1, 2)]
        results[name] = max(found, key=lambda each: each["tokens_per_s"])
        print(name, json.dumps(results[name]), flush=True)

    if args.off:
        async with AsyncLLMEngine(args.model, **settings) as engine:
            await rounds(engine, "flag off", [])
    most = max(args.adapters)
    flags = {"enable_lora": True, "max_loras": max(1, most), "max_lora_rank": args.rank}
    async with AsyncLLMEngine(args.model, **settings, **flags) as engine:
        files = write_adapter(engine.config.model, folder / "adapter", args.rank, 0)
        loras = [LoRARequest(f"a{i}", i + 1, files) for i in range(most)]
        for count in args.adapters:
            await rounds(engine, f"{count} adapters", loras[:count])
        if args.load_gap:
            gaps = [await load_gap(engine, loras, args.streams - 1, None) for _ in range(2)]
            for name in ("b0", "b1"):  # one of the others gives up its slot
                fresh = LoRARequest(name, 99, files)
                gaps.append(await load_gap(engine, loras[: most - 1], args.streams - 1, fresh))
            results["load gap"] = dict(
                zip(("none", "none again", "load", "again"), gaps, strict=True)
            )
            print("load gap", results["load gap"], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--load-gap", action="store_true")
    parser.add_argument("--off", action="store_true", help="first without --enable-lora")
    args = parser.parse_args()
    print(json.dumps({"model": args.model, "rank": args.rank, **asyncio.run(run(args))}))


if __name__ == "__main__":
    main()
