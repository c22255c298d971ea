#!/usr/bin/env python3
"""Compares structured output with free text: tokens per second of JSON by a schema, and of text.

The same engine, prompts and number of streams, one after the other in one process; the last line is
JSON. The share of the free text's throughput is what to look at: the tokens themselves differ.
A model with made-up weights hardly ever ends a string, so it stays where masks are cheap; with
`bounded` strings it ends many, in places where no real text would, and masks are dear.

    bench_structured.py                                         the built-in model, on what is there
    bench_structured.py --model DIR --load-format dummy         made-up weights on a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import replace
from typing import Any

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from asyncllm.sampling_params import RequestOutputKind


def schema(**string: int) -> dict[str, Any]:
    """Records of a shape that is usual; `string`: more about their strings."""
    fields = {
        "name": {"type": "string", **string},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["small", "medium", "large"]},
        "tags": {"type": "array", "items": {"type": "string", **string}, "maxItems": 3},
        "fresh": {"type": "boolean"},
    }
    record = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": 64, "items": record}


SCHEMAS = {"free": None, "json": schema(), "bounded": schema(maxLength=20)}


async def measure(engine: AsyncLLMEngine, args: argparse.Namespace, wanted: Any) -> dict[str, Any]:
    rng = random.Random(args.seed)
    room = asyncio.Semaphore(args.streams)
    params = SamplingParams(
        temperature=1.0,
        max_tokens=args.output_len,
        ignore_eos=wanted is None,
        structured_outputs=None if wanted is None else StructuredOutputsParams(json=wanted),
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
    """The loop's time in plan, launch and finish of all steps so far."""
    host = engine.host_seconds
    return host.plan + host.launch + host.finish


async def run(args: argparse.Namespace) -> dict[str, Any]:
    more = {"load_format": args.load_format, "max_model_len": args.input_len + args.output_len}
    async with AsyncLLMEngine(args.model, max_num_seqs=args.streams, **more) as engine:
        short = argparse.Namespace(**{**vars(args), "num_prompts": args.streams, "output_len": 16})
        rows = {}
        for name, wanted in SCHEMAS.items():
            await measure(engine, short, wanted)  # warm: kernels, the grammar
            rows[name] = await measure(engine, args, wanted)
            rows[name]["share"] = round(
                rows[name]["output_tokens_per_s"] / rows["free"]["output_tokens_per_s"], 3
            )
        return {"device": engine.config.device, **rows}


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
    for name in SCHEMAS:
        row = result[name]
        print(
            f"{name}: {row['output_tokens_per_s']:,.0f} tokens/s, {row['share']:.0%} of free text, "
            f"loop {row['loop_share']:.0%}"
        )
    print(json.dumps({"conditions": vars(args), **result}))


if __name__ == "__main__":
    main()
