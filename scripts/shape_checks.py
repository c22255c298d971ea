"""The checks of gpu_shapes.py: fast paths against slow ones, on a few layers of a shape.

Answers are forced, one token a prompt again and again, and their log-probabilities compared: where
made-up weights choose, rounding parts two answers, and what follows says nothing. The measure is
the effect of the context: how far they move with another prompt of the same last tokens. A lost
state or page moves them as far, rounding by a small share of it, except where it has a router near
a tie choose other experts. So a preemption that moves answers further fails only if it does so
with routers that have no ties, too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_questions import ROOMY, Args
from model_shapes import EXPERT_COUNTS, Case, cut, write_shape

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams, types
from asyncllm.engine.engine_core import EngineCore
from asyncllm.engine.text.prompt import TokensPrompt
from asyncllm.step_plan import StepPlan

Prompts = Sequence[Sequence[int]]

MOST_SHARE = 0.25  # of the context's effect; bf16 against float32 has up to 0.07
LEAST_EFFECT = 0.02  # of the context, on log-probabilities
PROMPTS = [
    [(7 * place + 13 * i) % 5000 + 100 for i in range(20 + 22 * place)] for place in range(12)
]
SAME = 16  # last tokens of a prompt that its other context keeps
OTHERS = [[(31 * i) % 5000 + 100 for i in ids[:-SAME]] + ids[-SAME:] for ids in PROMPTS]
MAX_MODEL_LEN = 320
SCORED = list(range(100, 164))  # tokens
EMBEDDING_FACTOR = 10  # else rounding moves Qwen3-Next's answers nearly as contexts do
CONVOLUTION_FACTOR = 25  # else states get hardly any input
LONGER_MEMORY = 4  # less bias: states halve in 40 tokens, not at every one
SETTINGS: Args = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": MAX_MODEL_LEN,
    "cuda_graph_sizes": [1, 2, 4, 8, 12],
    "prefill_graph_sizes": [64, 256],
}
SLOW: Args = {"enforce_eager": True, "async_scheduling": False}
ALONE: Args = {"max_num_seqs": 1, "cuda_graph_sizes": [1]}  # one row has kernels of its own
BLOCKS = 60  # for all prompts and answers, which need 200 or more
OTHER_STEPS = [64, 100, 160]  # tokens, without preemption: what other chunks alone do
ROUTER = re.compile(r"\.(gate|router)(\.layer)?\.(weight|bias)")


class Answers(NamedTuple):
    scores: torch.Tensor  # float32 [prompts, tokens, SCORED], log-probabilities
    num_hits: int  # cached tokens of the prompts
    chunks: list[list[str]]  # of each prompt, as `record_chunks` writes them


async def answer(
    model: Path, args: Args, *rounds: Prompts, routes: bool = True
) -> tuple[list[Answers], int]:
    """Answer all prompts of a round at once, round after round. Also returns the pages per
    block. routes: False for routers that choose the same experts for all tokens."""
    async with AsyncLLMEngine(str(model), **ROOMY | SETTINGS | args) as engine:
        condition(engine, routes)
        answers = [await _answer(engine, prompts) for prompts in rounds]
        engine.check_idle()
        stats = engine.stats()
    preemptions = stats.num_preemptions_swap + stats.num_preemptions_recompute
    if "preemption_mode" in args and not preemptions:
        raise RuntimeError(f"nothing was preempted with {args}")
    return answers, stats.num_groups


async def _answer(engine: AsyncLLMEngine, prompts: Prompts) -> Answers:
    chunks = record_chunks(engine, prompts)
    outputs = await asyncio.gather(
        *(
            engine.generate(TokensPrompt(prompt_token_ids=list(ids)), forced(token=100 + 37 * i))
            for i, ids in enumerate(prompts)
        )
    )
    scores = torch.tensor([_scores(output) for output in outputs])
    return Answers(scores, sum(output.num_cached_tokens for output in outputs), chunks)


def record_chunks(engine: AsyncLLMEngine, prompts: Prompts) -> list[list[str]]:
    """Each prompt's chunks, from now on: "@64" where it gets a slot with 64 tokens computed,
    "64+16/80" for 16 tokens from there on in a step of 80, and "80:2" where decodes begin in steps
    of 2 tokens."""
    runner = _core(engine).worker.runner
    chunks: list[list[str]] = [[] for _ in prompts]
    by_prompt = {tuple(ids): chunks[i] for i, ids in enumerate(prompts)}
    launch = type(runner).launch

    def of(seq: types.Sequence) -> list[str]:
        return by_prompt[tuple(seq.request.prompt_token_ids)]

    def recorded(plan: StepPlan, *args: Any) -> types.LaunchedStep:
        for init in plan.slot_inits:
            of(init.seq).append(f"@{init.num_computed}")
        for row in plan.prefills:
            of(row.seq).append(f"{row.start}+{len(row.token_ids)}/{plan.num_tokens}")
        for seq, position in zip(plan.decodes.seqs, plan.decodes.positions.tolist(), strict=True):
            if not of(seq)[-1].endswith(size := f":{plan.num_tokens}"):
                of(seq).append(f"{position}{size}")
        return launch(runner, plan, *args)

    vars(runner)["launch"] = recorded
    return chunks


def _core(engine: AsyncLLMEngine) -> EngineCore:
    core = engine._core
    assert isinstance(core, EngineCore)
    return core


def forced(token: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, detokenize=False,
        allowed_token_ids=[token], logprob_token_ids=SCORED,
    )  # fmt: skip


def _scores(output: RequestOutput) -> list[list[float]]:
    rows = output.outputs[0].logprobs
    assert rows is not None
    return [[row[token].logprob for token in SCORED] for row in rows]


@torch.inference_mode()
def condition(engine: AsyncLLMEngine, routes: bool = True) -> None:
    """Make made-up weights more like trained ones: tokens are not drowned by layers, where their
    embeddings are not those of the output too, and recurrent layers remember. routes: as of
    `answer`."""
    core = _core(engine)
    loads = list(core.worker.runner.mixed.model.loads())
    is_tied = not any("lm_head" in load.name for load in loads)
    for load in loads:
        if "embed_tokens" in load.name and not is_tied:
            load.view.mul_(EMBEDDING_FACTOR)
        elif load.name.endswith("dt_bias"):
            load.view.sub_(LONGER_MEMORY)
        elif load.name.endswith("conv1d.weight"):
            load.view.mul_(CONVOLUTION_FACTOR)
        elif not routes and ROUTER.search(load.name):
            load.view.zero_()
    if core.worker.device.type == "cuda":
        torch.cuda.synchronize(core.worker.device)  # steps run on another stream


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The root mean square difference of each prompt's log-probabilities."""
    return (a - b).square().mean((1, 2)).sqrt()


def compare(ours: Answers, oracle: Answers, effect: torch.Tensor) -> tuple[bool, str]:
    """Whether all are as near as rounding brings them. effect: of each prompt's context."""
    shares = distance(ours.scores, oracle.scores) / effect
    detail = f"{shares.max():.3f} of the context's effect at most, {shares.median():.3f} at median"
    return bool((shares <= MOST_SHARE).all()), detail  # not if one is NaN


async def explain(
    model: Path, args: Args, tight: Args, ours: Answers, plain: Answers
) -> tuple[bool, str]:
    """`compare` with routers that choose the same experts always. Prints each prompt's way, and how
    far steps of other sizes without preemption move it."""
    graphs: Args = {"prefill_graph_sizes": OTHER_STEPS[:1]}
    steps = [graphs | {"max_num_batched_tokens": size} for size in OTHER_STEPS]
    others = [(await answer(model, args | each, PROMPTS))[0][0] for each in steps]
    (other,), _ = await answer(model, args, OTHERS)
    effect = distance(other.scores, plain.scores)
    elsewhere = torch.stack([distance(each.scores, plain.scores) for each in others]) / effect
    of_tokens = (ours.scores - plain.scores).square().mean(2).sqrt() / effect[:, None]
    for i, share in enumerate((distance(ours.scores, plain.scores) / effect).tolist()):
        far = (~(of_tokens[i] <= MOST_SHARE)).nonzero().flatten().tolist()
        print(
            f"     prompt {i}: {share:.3f}, in other steps {elsewhere[:, i].max():.3f} at most; "
            f"tokens over the bound: {len(far)}, first {far[:1]}; chunks {' '.join(ours.chunks[i])}"
        )
    (plain, other), _ = await answer(model, args, PROMPTS, OTHERS, routes=False)
    (ours,), _ = await answer(model, args | tight, PROMPTS, routes=False)
    return compare(ours, plain, distance(other.scores, plain.scores))


async def check(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Print each check. One slow engine is the oracle of graphs and of launching ahead."""
    model = write_shape(cut(case.shape), folder / f"{name}-cut")
    failed = []

    def report(title: str, ok: bool, detail: str) -> None:
        if not ok:
            failed.append(title)
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {title}: {detail}", flush=True)

    (plain, warm, other), num_groups = await answer(model, case.args, PROMPTS, PROMPTS, OTHERS)
    effect = distance(other.scores, plain.scores)
    report("the context has an effect", bool((effect > LEAST_EFFECT).all()), f"{effect.min():.3f}")
    ok, detail = compare(warm, plain, effect)
    report("cached = cold", ok and warm.num_hits > 0, f"{detail}, {warm.num_hits} tokens hit")
    (slow,), _ = await answer(model, case.args | SLOW, PROMPTS)
    ok, detail = compare(plain, slow, effect)
    report("graphs, one ahead = eager, synchronous", ok, detail)
    if not ok:
        for each, setting in SLOW.items():
            (again,), _ = await answer(model, case.args | {each: setting}, PROMPTS)
            report(f"{each} {setting} = its opposite", *compare(plain, again, effect))
    (alone,), _ = await answer(model, case.args | ALONE, PROMPTS)
    report("alone = beside others", *compare(alone, plain, effect))
    has_routers = any(name in case.shape for name in EXPERT_COUNTS)
    for mode in ("swap", "recompute"):
        tight = {"num_gpu_blocks_override": BLOCKS * num_groups, "preemption_mode": mode}
        (again,), _ = await answer(model, case.args | tight, PROMPTS)
        ok, detail = compare(again, plain, effect)
        if not ok:
            is_routing, fixed = await explain(model, case.args, tight, again, plain)
            ok = is_routing and has_routers and bool(again.scores.isfinite().all())
            detail += f"; with routers that choose the same experts always, {fixed}"
        report(f"preempted ({mode}) = never", ok, detail)
    return {"checks": "FAIL: " + ", ".join(failed) if failed else "ok"}
