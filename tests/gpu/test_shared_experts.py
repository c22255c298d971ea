"""Engines on a GPU each that share the experts of a mixture, by NCCL in graphs and without.

Needs two GPUs, some tests four. `pytest -m gpu tests/gpu/test_shared_experts.py -v`
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, LoRARequest, RequestOutput, StructuredOutputsParams
from asyncllm.engine.data_parallel.remote import RemoteCore
from asyncllm.errors import RequestFailedError
from tests.data_parallel.test_two_engines import group_of
from tests.parallel.engines import Ask, greedy
from tests.parallel.test_every_kind_of_model import (
    write_adapter_of_experts,
    write_mixture_with_words,
)
from tests.waiting import run, until

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")]
NEEDS_FOUR = pytest.mark.skipif(NUM_GPUS < 4, reason="needs four CUDA devices")
TOLERANCE = 0.15  # of log-probabilities, in bfloat16
ARGS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 32, "max_model_len": 2048,
    "gpu_memory_utilization": 0.3, "swap_space": 0.1, "max_num_batched_tokens": 1024,
}  # fmt: skip
WAYS = {
    "dp2": {"data_parallel_size": 2},
    "dp4": {"data_parallel_size": 4},
    "dp2-tp2": {"data_parallel_size": 2, "tensor_parallel_size": 2},
}
EACH_WAY = pytest.mark.parametrize(
    "way", ["dp2", *(pytest.param(way, marks=NEEDS_FOUR) for way in ("dp4", "dp2-tp2"))]
)
REGEX = StructuredOutputsParams(regex=r"(yes|no), [a-z]{3,9}\.")
ASKS = [
    *(Ask(f"{i} times upon a time there was a dog " * (1 + 7 * (i % 3)), greedy(24 + i % 5,
          prompt_logprobs=1)) for i in range(18)),
    Ask("Answer:", greedy(12, structured_outputs=REGEX)),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture_with_words(tmp_path_factory.mktemp("mixture"), window=4096)


async def answers(
    engine: AsyncLLMEngine, loras: Sequence[LoRARequest | None] = (None,)
) -> list[RequestOutput]:
    """Half of them at once, the others while those run."""
    asked = []
    for i, ask in enumerate(ASKS):
        asked.append(asyncio.ensure_future(_final(engine, ask, loras[i % len(loras)])))
        if i >= len(ASKS) // 2:
            await asyncio.sleep(0.01)
    return list(await asyncio.gather(*asked))


async def _final(engine: AsyncLLMEngine, ask: Ask, lora: LoRARequest | None) -> RequestOutput:
    return await engine.generate(*ask, lora_request=lora)


def expect_near(
    ours: Sequence[RequestOutput], expected: Sequence[RequestOutput], rerouted: float = 0.0
) -> None:
    """Log-probabilities of the prompt, and tokens with theirs until two are equally likely.
    rerouted: the share of tokens for which rounding may choose another expert."""
    gaps: list[float] = []
    for output, other in zip(ours, expected, strict=True):
        for entry, found in zip(output.prompt_logprobs or (), other.prompt_logprobs or (),
                                strict=True):  # fmt: skip
            tokens = (entry or {}).keys() & (found or {}).keys()
            gaps += (abs(entry[token].logprob - found[token].logprob) for token in tokens)
        (answer,), (other_answer,) = output.outputs, other.outputs
        assert answer.logprobs is not None and other_answer.logprobs is not None
        pairs = zip(answer.token_ids, other_answer.token_ids, strict=False)
        for (token, right), entry, found in zip(
            pairs, answer.logprobs, other_answer.logprobs, strict=False
        ):
            gaps.append(abs(entry[token].logprob - found[right].logprob))
            if token != right:  # a near tie: what follows has another context
                break
    assert gaps
    far = [round(gap, 2) for gap in gaps if not gap <= TOLERANCE]
    assert len(far) <= rerouted * len(gaps), f"{len(far)} of {len(gaps)} are off: {far}"


def alone(folder: Path, **args: Any) -> list[RequestOutput]:
    async def main() -> list[RequestOutput]:
        async with AsyncLLMEngine(str(folder), **ARGS | args) as engine:
            return await answers(engine)

    return run(main())


@EACH_WAY
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "synchronous"])
def test_answers_of_one_engine(folder: Path, way: str, is_eager: bool, is_ahead: bool) -> None:
    args = {"enforce_eager": is_eager, "async_scheduling": is_ahead}
    expected = alone(folder, **args)

    async def main() -> None:
        shared = ARGS | args | WAYS[way] | {"enable_expert_parallel": True}
        async with AsyncLLMEngine(str(folder), **shared) as engine:
            expect_near(await answers(engine), expected)
            await until(lambda: engine.stats().num_running == 0)
            engine.check_idle()
            engine.check_integrity()
            works = [replica.work for replica in engine.replicas]
            # Each process says once a second what it has done.
            await until(lambda: all(sum(work.steps.values()) for work in works))
            for replica in engine.replicas:
                assert replica.recorder.generation_tokens > 0
                modes = {mode for (_, mode), count in replica.work.steps.items() if count}
                assert modes == {"eager" if is_eager else "graph"}

    run(main())


@EACH_WAY
def test_who_has_no_work_replays_the_same_graphs(folder: Path, way: str) -> None:
    async def main() -> None:
        shared = ARGS | WAYS[way] | {"enable_expert_parallel": True}
        async with AsyncLLMEngine(str(folder), **shared) as engine:
            for ask in ASKS[:4]:  # one at a time: all go to the first engine
                await engine.generate(*ask)
            await asyncio.sleep(2.5)  # each process says once a second what it has done
            busy, *idle = (replica.work for replica in engine.replicas)
            assert busy.steps["decode", "graph"] > 50 and busy.steps["mixed", "graph"] >= 4
            for work in idle:
                assert work.steps == busy.steps and work.num_tokens == 0 < work.num_padding

    run(main())


def test_adapters_of_experts(folder: Path, tmp_path: Path) -> None:
    folders = [write_adapter_of_experts(tmp_path / str(seed), seed) for seed in range(2)]
    loras = [None, *(LoRARequest(each.name, lora_path=each) for each in folders)]
    args = ARGS | {"enable_lora": True, "max_loras": 2}

    async def answered(**more: Any) -> list[RequestOutput]:
        async with AsyncLLMEngine(str(folder), **args | more) as engine:
            return await answers(engine, loras)

    async def plain() -> list[RequestOutput]:
        async with AsyncLLMEngine(str(folder), **args) as engine:
            return await answers(engine)

    expected = run(answered())
    ours = run(answered(**WAYS["dp2"], enable_expert_parallel=True))
    expect_near(ours, expected, rerouted=0.02)
    with pytest.raises(AssertionError, match="are off"):  # the comparison tells adapters apart
        expect_near(run(plain()), expected, rerouted=0.02)


def test_a_lost_engine(folder: Path) -> None:
    """In the midst of a graph: the other one's kernels wait for it, and are ended with it."""
    expected = alone(folder)

    async def main() -> None:
        shared = ARGS | WAYS["dp2"] | {"enable_expert_parallel": True}
        async with AsyncLLMEngine(str(folder), **shared) as engine:
            endless = greedy(1900, ignore_eos=True)
            running = [asyncio.ensure_future(_final(engine, Ask("Once", endless), None))
                       for _ in range(4)]  # fmt: skip
            await until(lambda: engine.stats().num_running == 4)
            victim = group_of(engine).members[1]
            assert isinstance(victim, RemoteCore)
            os.kill(victim.process._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            async with asyncio.timeout(10):
                for each in running:
                    with pytest.raises(RequestFailedError, match="engine"):
                        await each
            await until(lambda: engine.health() is None)
            expect_near(await answers(engine), expected)

    run(main())
