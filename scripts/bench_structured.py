#!/usr/bin/env python3
"""What structured output costs: tokens per second of JSON by a schema beside those of free text.

The same engine, prompts and number of streams, one after the other in one process; the last line is
JSON. The share of the free text's throughput is what to look at: the tokens themselves differ.

    bench_structured.py                                         the built-in model, on what is there
    bench_structured.py --model DIR --load-format dummy         made-up weights on a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, replace
from typing import Any

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from asyncllm.sampling_params import RequestOutputKind

SCHEMA = {
    "type": "array",
    "minItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["small", "medium", "large"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
            "fresh": {"type": "boolean"},
        },
        "required": ["name", "count", "kind", "tags", "fresh"],
        "additionalProperties": False,
    },
}


async def measure(engine: AsyncLLMEngine, args: argparse.Namespace, schema: Any) -> dict[str, Any]:
    rng = random.Random(args.seed)
    room = asyncio.Semaphore(args.streams)
    wanted = None if schema is None else StructuredOutputsParams(json=schema)
    params = SamplingParams(
        temperature=1.0,
        max_tokens=args.output_len,
        ignore_eos=schema is None,
        structured_outputs=wanted,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    vocab_size = engine.config.model.vocab_size

    async def one(seed: int) -> RequestOutput:
        ids = [rng.randrange(100, min(vocab_size, 30000)) for _ in range(args.input_len)]
        async with room:
            return await engine.generate({"prompt_token_ids": ids}, replace(params, seed=seed))

    start, before = time.perf_counter(), host_seconds(engine)
    outputs = await asyncio.gather(*(one(i) for i in range(args.num_prompts)))
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / seconds, 1),
        "loop_share": round((host_seconds(engine) - before) / seconds, 3),
    }


def host_seconds(engine: AsyncLLMEngine) -> float:
    """Of the loop, in the verbs of all steps so far."""
    return sum(asdict(engine.host_seconds).values())


async def run(args: argparse.Namespace) -> dict[str, Any]:
    more = {"load_format": args.load_format, "max_model_len": args.input_len + args.output_len}
    async with AsyncLLMEngine(args.model, max_num_seqs=args.streams, **more) as engine:
        short = argparse.Namespace(**{**vars(args), "num_prompts": args.streams, "output_len": 16})
        await measure(engine, short, SCHEMA)  # warm: kernels, the grammar
        free = await measure(engine, args, None)
        structured = await measure(engine, args, SCHEMA)
        device = engine.config.device
    share = structured["output_tokens_per_s"] / free["output_tokens_per_s"]
    return {"device": device, "free": free, "json": structured, "share": round(share, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=192)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = asyncio.run(run(args))
    for name in ("free", "json"):
        row = result[name]
        print(f"{name}: {row['output_tokens_per_s']:,.0f} tokens/s, loop {row['loop_share']:.0%}")
    print(json.dumps({"conditions": vars(args), **result}))


if __name__ == "__main__":
    main()
