"""The checks of gpu_check.py: every fast path of the engine against its slow oracle.

All run on the built-in model, whose greedy answers have clear margins: equal means equal tokens.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_questions import (
    EAGER,
    FILTERED,
    GREEDY,
    HOSTED,
    LONG_QUESTIONS,
    MASKED,
    PENALISED,
    QUESTIONS,
    ROOMY,
    SAMPLED,
    SCORED,
    TIGHT,
    Args,
)

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from asyncllm.graphs.decode_graphs import PERSISTENT
from asyncllm.kernels.persistent_decode import KERNEL, MAX_ROWS

Outcome = tuple[bool, str]  # whether it holds, and what was seen
Check = Callable[[], Coroutine[Any, Any, Outcome]]

LOGPROB_TOLERANCE = 0.15  # bf16 activations, other reduction orders
LEAK_TOLERANCE_BYTES = 32 << 20


@dataclass(frozen=True)
class Answers:
    outputs: list[RequestOutput]
    stats: Any

    @property
    def tokens(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]


async def ask(
    engine: AsyncLLMEngine, questions: list[str], params: list[SamplingParams]
) -> list[RequestOutput]:
    """All at once; question i with params i, in turn."""
    return await asyncio.gather(
        *(
            engine.generate([{"role": "user", "content": question}], params[i % len(params)])
            for i, question in enumerate(questions)
        )
    )


async def answer(params: list[SamplingParams], args: Args) -> Answers:
    """QUESTIONS through an engine of its own."""
    async with AsyncLLMEngine("tiny", **args) as engine:
        outputs = await ask(engine, QUESTIONS, params)
        engine.check_idle()
        return Answers(outputs, engine.stats())


def equal(ours: Answers, oracle: Answers) -> Outcome:
    """The detail says where the first unequal answer diverges."""
    pairs = list(zip(ours.tokens, oracle.tokens, strict=True))
    diverged = [place for place, (a, b) in enumerate(pairs) if a != b]
    detail = f"{len(pairs) - len(diverged)}/{len(pairs)} answers equal"
    if not diverged:
        return True, detail
    a, b = pairs[diverged[0]]
    at = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )
    return (
        False,
        f"{detail}, answer {diverged[0]} diverges at token {at}: {a[at:][:3]}, {b[at:][:3]}",
    )


async def same_tokens(params: list[SamplingParams], ours: Args, oracle: Args) -> Outcome:
    return equal(await answer(params, ours), await answer(params, oracle))


async def plainly_as_in_full(params: list[SamplingParams]) -> Outcome:
    """A bias of zero edits the logits, so such rows are sampled in full."""
    in_full = [replace(each, logit_bias={0: 0.0}) for each in params]
    return equal(await answer(params, ROOMY), await answer(in_full, ROOMY))


async def cached_as_cold() -> Outcome:
    async with AsyncLLMEngine("tiny", **ROOMY) as engine:
        cold, warm = [
            Answers(await ask(engine, LONG_QUESTIONS, GREEDY), engine.stats()) for _ in range(2)
        ]
    hits = sum(output.num_cached_tokens for output in warm.outputs)
    ok, detail = equal(warm, cold)
    return ok and hits > 0, f"{detail}, {hits} prompt tokens from the cache"


async def preempted_as_never(mode: str) -> Outcome:
    ours = await answer(GREEDY, TIGHT | {"preemption_mode": mode})
    counts = ours.stats.num_preemptions_swap, ours.stats.num_preemptions_recompute
    ok, detail = equal(ours, await answer(GREEDY, ROOMY))
    return ok and sum(counts) > 0, f"{detail}, {counts[0]} swaps, {counts[1]} recomputations"


async def batched_as_alone() -> Outcome:
    async with AsyncLLMEngine("tiny", **ROOMY) as engine:
        alone = [(await ask(engine, [question], GREEDY))[0] for question in QUESTIONS]
        oracle = Answers(alone, engine.stats())
    return equal(await answer(GREEDY, ROOMY), oracle)


async def flashinfer_as_torch() -> Outcome:
    reference = await answer(SCORED, EAGER | {"attention_backend": "torch"})
    ours = await answer(SCORED, ROOMY | {"attention_backend": "flashinfer"})
    gap = prompt_logprob_gap(ours, reference)
    ok, detail = equal(ours, reference)
    return ok and gap < LOGPROB_TOLERANCE, f"{detail}, prompt logprobs differ by at most {gap:.3f}"


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


async def persistent_as_layers() -> Outcome:
    if torch.cuda.get_device_capability() not in KERNEL.capabilities:
        return True, "this GPU has no such kernel"
    args = ROOMY | {"max_num_seqs": MAX_ROWS}
    async with AsyncLLMEngine("tiny", **args) as engine:
        kernels = engine.startup["decode_kernels"]
        ours = Answers(await ask(engine, QUESTIONS, GREEDY), engine.stats())
    ok, detail = equal(ours, await answer(GREEDY, args | {"attention_backend": "flashinfer"}))
    return ok and kernels.keys() == {PERSISTENT}, f"{detail}, by {kernels}"


@contextmanager
def synchronisation_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


async def no_synchronisation() -> Outcome:
    async with AsyncLLMEngine("tiny", **ROOMY) as engine:
        await ask(engine, QUESTIONS, HOSTED)  # a logits processor's first call may synchronise
        with synchronisation_forbidden():
            await ask(engine, QUESTIONS, SAMPLED)
            await ask(engine, QUESTIONS, HOSTED)
        engine.check_idle()
    return True, "torch.cuda.set_sync_debug_mode('error') around two batches, one with masks"


async def schema_is_kept() -> Outcome:
    """On the device too: JSON that is complete, and digits of the right kind."""
    answers = await answer(HOSTED, ROOMY)
    texts = [output.outputs[0].text for output in answers.outputs[1 :: len(HOSTED)]]
    records = [json.loads(text) for text in texts]
    ok = all(set(r) == {"sum", "sure"} and isinstance(r["sum"], int) for r in records)
    return ok and len(records) > 1, f"{len(records)} answers parse, the first is {texts[0]!r}"


async def no_leak() -> Outcome:
    left = []
    for _ in range(3):
        await answer(GREEDY, ROOMY)
        gc.collect()
        torch.cuda.empty_cache()
        left.append((torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()))
    lost = left[0][0] - left[-1][0]
    history = ", ".join(f"{free >> 20} free {used >> 20} held" for free, used in left)
    # Of the device's memory: what another process takes meanwhile counts.
    return lost < LEAK_TOLERANCE_BYTES, f"{lost >> 20} MiB lost over three engines ({history})"


CHECKS: list[tuple[str, Check]] = [
    ("graph = eager, greedy", partial(same_tokens, GREEDY, ROOMY, EAGER)),
    ("graph = eager, sampled", partial(same_tokens, SAMPLED, ROOMY, EAGER)),
    (
        "one ahead = synchronous",
        partial(same_tokens, SAMPLED, ROOMY, ROOMY | {"async_scheduling": False}),
    ),
    ("graph = eager, rows that need the host", partial(same_tokens, HOSTED, ROOMY, EAGER)),
    (
        "one ahead = synchronous, rows that need the host",
        partial(same_tokens, HOSTED, ROOMY, ROOMY | {"async_scheduling": False}),
    ),
    ("graph = eager, masked rows", partial(same_tokens, MASKED, ROOMY, EAGER)),
    ("masked plainly = in full", partial(plainly_as_in_full, MASKED)),
    ("graph = eager, filtered rows", partial(same_tokens, FILTERED, ROOMY, EAGER)),
    ("filtered plainly = in full", partial(plainly_as_in_full, FILTERED)),
    ("graph = eager, penalised rows", partial(same_tokens, PENALISED, ROOMY, EAGER)),
    ("penalised plainly = in full", partial(plainly_as_in_full, PENALISED)),
    (
        "penalised, swapped = never preempted",
        partial(same_tokens, PENALISED, TIGHT | {"preemption_mode": "swap"}, ROOMY),
    ),
    ("structured output", schema_is_kept),
    ("cached = cold", cached_as_cold),
    ("swapped = never preempted", partial(preempted_as_never, "swap")),
    ("recomputed = never preempted", partial(preempted_as_never, "recompute")),
    ("batched = alone", batched_as_alone),
    ("FlashInfer = torch", flashinfer_as_torch),
    ("persistent decode = layers", persistent_as_layers),
    ("no hidden synchronisation", no_synchronisation),
    ("no leak", no_leak),
]
