#!/usr/bin/env python3
"""Compile every Triton kernel that engines of published shapes launch, for sm_90, without a GPU.

    scripts/compile_starts.py [NAME ...]      shapes of model_shapes.py, a few layers of each
    scripts/compile_starts.py --no-compile    only list the variants, in less time

An engine starts and serves on a fake device (fake_cuda.py). Prints the kernels, with the most
registers, shared memory and spills of their variants, and as FAIL what should not happen: spills,
variants that a request would wait for, waits of the host within a step or a capture. The exit
status is 1 if there is any. Needs Triton, and TRITON_INTERPRET unset.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from fake_cuda import fake_cuda
from fake_triton import STEPS, Seen, Variant
from model_shapes import CASES, Case, cut, write_shape

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.engine.text.prompt import TokensPrompt

SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "device": "cuda",
    "max_model_len": 4096,
    "swap_space": 0.1,
}
PROMPT_LENS = (1, 2, 5, 17, 64, 100, 333, 800)
NUM_REQUESTS = (1, 3, 40)  # at a time
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)


async def serve(model: Path, args: dict[str, Any], seen: Seen) -> None:
    numbers = random.Random(0)
    async with AsyncLLMEngine(str(model), **SETTINGS | args) as engine:
        seen.phase = STEPS
        for count in NUM_REQUESTS:
            lengths = numbers.choices(PROMPT_LENS, k=count)
            prompts = [numbers.choices(range(3, 5000), k=length) for length in lengths]
            requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
            await asyncio.gather(*(engine.generate(each, GREEDY) for each in requests))
        seen.phase = "start"  # no step runs while the engine closes


def compile_start(name: str, case: Case, options: argparse.Namespace) -> list[str]:
    """Print the kernels of a shape and return its problems, which are printed as well."""
    args = case.args | json.loads(options.args)
    with tempfile.TemporaryDirectory() as folder, fake_cuda(compiles=options.compile) as seen:
        model = write_shape(cut(case.shape, options.layers), Path(folder) / name)
        asyncio.run(serve(model, args, seen))
    print(f"{name}: {len(seen.variants)} variants")
    by_name: dict[str, list[Variant]] = defaultdict(list)
    for variant in seen.variants.values():
        by_name[variant.name].append(variant)
    for kernel, variants in sorted(by_name.items()):
        most = [max(v.regs for v in variants), max(v.shared for v in variants)]
        spills = max(v.spills for v in variants)
        numbers = f"{most[0]:4} registers {most[1]:7} shared {spills:5} spilled"
        print(f"  {len(variants):3} {kernel:28} {numbers if options.compile else ''}")
    problems = seen.problems()
    for problem in problems:
        print(f"  FAIL {problem}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--args", default="{}", help="more engine arguments, as JSON")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    cases = {name: CASES[name] for name in options.names or CASES}
    problems = [compile_start(name, case, options) for name, case in cases.items()]
    return 1 if any(problems) else 0


if __name__ == "__main__":
    sys.exit(main())
