"""Models on several ranks against one rank, and a rank that is killed: gpu_ranks.py runs each check
in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from gpu_oracles import Answers, ask, equal
from gpu_questions import GREEDY, HOSTED, QUESTIONS, ROOMY, SAMPLED, TIGHT, Args

from asyncllm import AsyncLLMEngine, SamplingParams

LAYOUTS: dict[str, Args] = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "tp8": {"tensor_parallel_size": 8},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2, "data_parallel_backend": "mp"},
    "dp4": {"data_parallel_size": 4, "data_parallel_backend": "mp"},
    "ep2": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "ep4": {"data_parallel_size": 4, "enable_expert_parallel": True},
}
MIXTURES = ("ep2", "ep4")  # layouts that the built-in model is not for
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "with rows that need the host": HOSTED}
ENGINES: dict[str, Args] = {  # beside ROOMY, for all kinds but where pages are few
    "graph": {},
    "synchronous": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "swap": TIGHT | {"preemption_mode": "swap"},
    "recompute": TIGHT | {"preemption_mode": "recompute"},
}


async def ranks_as_one(layout: str, engine: str) -> tuple[bool, str]:
    """Every kind of sampling, each by one engine of both."""
    args = ROOMY | LAYOUTS[layout] | ENGINES[engine]
    is_tight = "preemption_mode" in args
    kinds = {"greedy": GREEDY} if is_tight else KINDS
    if "data_parallel_size" in args:  # to whose processes no function can be sent
        kinds = {
            kind: [each for each in params if not each.logits_processors]
            for kind, params in kinds.items()
        }
    ours, oracle = await answers(args, kinds), await answers(ROOMY, kinds)
    results = {kind: equal(ours[kind], oracle[kind]) for kind in kinds}
    stats = ours["greedy"].stats
    preempted = stats.num_preemptions_swap + stats.num_preemptions_recompute
    ok = all(found for found, _ in results.values()) and (preempted > 0 or not is_tight)
    details = [f"{kind}: {detail}" for kind, (_, detail) in results.items()]
    return ok, "; ".join((*details, f"{preempted} preemptions"))


async def answers(args: Args, kinds: dict[str, list[SamplingParams]]) -> dict[str, Answers]:
    found = {}
    async with AsyncLLMEngine("tiny", **args) as engine:
        for kind, params in kinds.items():
            found[kind] = Answers(await ask(engine, QUESTIONS, params), engine.stats())
        engine.check_idle()
    return found


async def killed_rank(layout: str) -> tuple[bool, str]:
    """Its requests end with an error, and the engine serves again."""
    async with AsyncLLMEngine("tiny", **ROOMY | LAYOUTS[layout]) as engine:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        begun = asyncio.Event()
        stream = asyncio.ensure_future(collect(engine, params, begun))
        await begun.wait()
        os.kill(children()[-1], signal.SIGKILL)
        killed = time.perf_counter()
        try:
            await asyncio.wait_for(stream, 30)
            return False, "the stream went on"
        except Exception as error:
            said = f"{type(error).__name__} after {time.perf_counter() - killed:.2f} s"
        while True:
            try:
                output = await engine.generate("Once", SamplingParams(temperature=0, max_tokens=4))
                break
            except Exception:
                if time.perf_counter() - killed > 60:
                    raise
                await asyncio.sleep(0.5)
        took = time.perf_counter() - killed
    return not children(), f"{said}; serves again after {took:.1f} s: {output.outputs[0].text!r}"


async def collect(engine: AsyncLLMEngine, params: SamplingParams, begun: asyncio.Event) -> None:
    async for _ in engine.generate("Once upon a time", params):
        begun.set()


def children() -> list[int]:
    """The processes of ranks that this one has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = status.with_name("cmdline").read_bytes()
            if parent == os.getpid() and b"follower" in command:
                found.append(int(status.parent.name))
    return sorted(found)


def named_checks() -> dict[str, tuple[str, Any]]:
    """Name -> layout and a coroutine function."""
    checks: dict[str, tuple[str, Any]] = {}
    for layout in (each for each in LAYOUTS if each not in MIXTURES):
        for engine in ENGINES if layout in ("tp2", "pp2") else ("graph",):
            name = f"{layout} = one, {engine}"
            checks[name] = layout, lambda a=layout, e=engine: ranks_as_one(a, e)
    for layout in ("tp2", "tp4"):
        checks[f"{layout}, killed rank"] = layout, lambda a=layout: killed_rank(a)
    return checks
