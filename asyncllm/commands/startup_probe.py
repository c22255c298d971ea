"""One start of an engine in a process of its own, for `asyncllm bench startup`.

Reads the flags as JSON from standard input, answers one request, writes one JSON line.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

STARTED = time.perf_counter()  # before the imports, which are most of a start

import asyncio
import json
import sys
from typing import Any

from asyncllm.commands.fast_start import begin_fast_start
from asyncllm.config import EngineArgs
from asyncllm.sampling_params import SamplingParams


async def probe(args: EngineArgs) -> dict[str, Any]:
    from asyncllm.engine.async_engine import AsyncLLMEngine

    imported = time.perf_counter() - STARTED
    params = SamplingParams(max_tokens=1, detokenize=not args.skip_tokenizer_init)
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        await engine.generate([3], params)
        total = time.perf_counter() - STARTED
        startup = engine.startup
    phases = {"imports": imported, **startup.pop("seconds")}
    return {"to_first_token_s": total, "phases": phases, "conditions": startup}


if __name__ == "__main__":
    engine_args = EngineArgs(**json.load(sys.stdin))
    begin_fast_start(engine_args.device)
    print(json.dumps(asyncio.run(probe(engine_args))))
