"""The checks of gpu_shapes.py: fast paths against slow ones, on a few layers of a shape.

Random weights have near ties everywhere: two answers agree if, where they first differ, both rate
the two tokens within TIE of each other.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

from gpu_questions import ROOMY, Args
from model_shapes import Case, cut, write_shape

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from asyncllm.engine.text.prompt import TokensPrompt

TIE = 0.25  # of two log-probabilities in bf16, whose sums another path adds in another order
PROMPTS = [
    [(7 * place + 13 * i) % 5000 + 100 for i in range(20 + 22 * place)] for place in range(12)
]
MAX_MODEL_LEN = 320
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5, detokenize=False)
SETTINGS: Args = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": MAX_MODEL_LEN,
    "cuda_graph_sizes": [1, 2, 4, 8, 12],
    "prefill_graph_sizes": [64, 256],
}
SLOW: Args = {"enforce_eager": True, "async_scheduling": False}
BLOCKS = 60  # for all prompts and answers, which need 200 or more


async def answer(model: Path, args: Args, times: int = 1) -> tuple[list[list[RequestOutput]], int]:
    """Answer all prompts at once, `times` times by one engine. Also returns the pages per block."""
    async with AsyncLLMEngine(str(model), **ROOMY | SETTINGS | args) as engine:
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
    return answers, stats.num_groups


def compare(ours: list[RequestOutput], oracle: list[RequestOutput]) -> tuple[bool, str]:
    """Whether all agree; how many are equal, and the widest gap where the others diverge."""
    gaps = [gap_at_parting(*pair) for pair in zip(ours, oracle, strict=True)]
    diverged = [gap for gap in gaps if gap is not None]
    detail = f"{len(gaps) - len(diverged)}/{len(gaps)} equal"
    if diverged:
        detail += f", the others diverge where log-probabilities are {max(diverged):.3f} apart"
    return all(gap <= TIE for gap in diverged), detail


def gap_at_parting(a: RequestOutput, b: RequestOutput) -> float | None:
    """The most by which one prefers its own token to the other's, where they first differ."""
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


async def check(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Print each check. One slow engine is the oracle of graphs and of launching ahead."""
    model = write_shape(cut(case.shape), folder / f"{name}-cut")
    failed = []

    def report(title: str, ok: bool, detail: str) -> None:
        if not ok:
            failed.append(title)
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {title}: {detail}", flush=True)

    (plain, warm), num_groups = await answer(model, case.args, times=2)
    ok, detail = compare(warm, plain)
    hits = sum(output.num_cached_tokens for output in warm)
    report("cached = cold", ok and hits > 0, f"{detail}, {hits} tokens hit")
    (slow,), _ = await answer(model, case.args | SLOW)
    ok, detail = compare(plain, slow)
    report("graphs, one ahead = eager, synchronous", ok, detail)
    if not ok:
        for each, setting in SLOW.items():
            (other,), _ = await answer(model, case.args | {each: setting})
            report(f"{each} {setting} = its opposite", *compare(plain, other))
    for mode in ("swap", "recompute"):
        tight = {"num_gpu_blocks_override": BLOCKS * num_groups, "preemption_mode": mode}
        (other,), _ = await answer(model, case.args | tight)
        report(f"preempted ({mode}) = never", *compare(plain, other))
    return {"checks": "FAIL: " + ", ".join(failed) if failed else "ok"}
