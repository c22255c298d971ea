"""The built-in model on two ranks, each a process: whatever is asked, the answers of one rank."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, EngineArgs, SamplingParams, StructuredOutputsParams
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.state_cache import StateLayout
from asyncllm.errors import ModelLoadError
from asyncllm.models.parallel.mesh import Alone
from asyncllm.models.registry import settle
from asyncllm.worker.memory import plan_memory
from tests.parallel.engines import SMALL, Ask, answers, expect_same, followers, greedy
from tests.waiting import run

STORY = "Once upon a time there was a little dog who lived in a big house with"
ASKS = [
    Ask(STORY, greedy(24, prompt_logprobs=1)),
    Ask(STORY, greedy(6)),  # a prefix that is there already, or is computed beside
    Ask("A cat", SamplingParams(temperature=1.0, seed=7, max_tokens=16, logprobs=1)),
    Ask("The", SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=9, top_p=0.9)),
    Ask("The dog", greedy(12, repetition_penalty=1.3, logit_bias={5: 2.0}, min_tokens=4)),
    Ask(
        "Answer:",
        greedy(16, structured_outputs=StructuredOutputsParams(regex=r"(yes|no), [a-z]{3,9}\.")),
    ),
    Ask("No", greedy(8, bad_words=["the", " dog"], allowed_token_ids=list(range(100, 900)))),
]


def listening(pids: set[int]) -> set[tuple[str, str]]:
    """Sockets at which processes listen, and their addresses, without ports, in hexadecimal as
    /proc/net/tcp."""
    inodes = set()
    for pid in pids:
        for name in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                inodes.add(os.readlink(name))
    found: set[tuple[str, str]] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and (link := f"socket:[{fields[9]}]") in inodes:
                found.add((link, fields[1].partition(":")[0]))
    return found


@pytest.mark.slow
def test_ranks_of_one_host_listen_at_no_address_of_others() -> None:
    async def test() -> None:
        before = listening({os.getpid()})  # Ray leaves some in the process of its tests
        async with AsyncLLMEngine("tiny", **SMALL, tensor_parallel_size=2):
            new = listening({os.getpid(), *followers()}) - before
            assert {address for _, address in new} == {"0100007F"}  # 127.0.0.1

    run(test())


@pytest.mark.true_start
def test_all_that_sampling_knows_in_one_batch() -> None:
    expected = run(answers("tiny", ASKS))
    expect_same(run(answers("tiny", ASKS, tensor_parallel_size=2)), expected)


@pytest.mark.slow
def test_the_second_time_the_prefix_is_cached_on_all_ranks() -> None:
    async def twice() -> None:
        asks = [Ask(STORY, greedy(10)), Ask(f"{STORY} her", greedy(10))]
        expected = await answers("tiny", asks)
        async with AsyncLLMEngine("tiny", tensor_parallel_size=2, **SMALL) as engine:
            for _ in range(2):
                outputs = [await engine.generate(*ask) for ask in asks]
                expect_same(outputs, expected)
            assert outputs[0].num_cached_tokens

    run(twice())


@dataclass(frozen=True, slots=True)
class Beside(Alone):
    """Another rank has room for 30 of whatever is counted."""

    def least(self, number: int) -> int:
        return min(number, 30)


def test_pages_are_those_of_the_rank_with_the_least() -> None:
    config = EngineArgs("tiny", tensor_parallel_size=2, **SMALL).create_engine_config()
    config, model = settle(config)
    layout = CacheLayout(model.attention_layers, config.block_size, torch.float32)
    cpu = torch.device("cpu")
    sizes = layout, StateLayout(model.state_layers), cpu
    alone = plan_memory(model, config, *sizes, Alone())
    assert alone.num_pages == SMALL["num_gpu_blocks_override"] and alone.num_host_pages > 30
    plan = plan_memory(model, config, *sizes, Beside())
    assert (plan.num_pages, plan.num_host_pages, plan.max_model_len) == (30, 30, 120)


@pytest.mark.slow
def test_two_engines_of_ranks_in_one_program() -> None:
    async def both() -> None:
        asks = ASKS[:2]
        expected = await answers("tiny", asks)
        one = AsyncLLMEngine("tiny", tensor_parallel_size=2, **SMALL)
        other = AsyncLLMEngine("tiny", tensor_parallel_size=2, **SMALL)
        async with one, other:
            assert len(followers()) == 2
            for engine in (one, other):
                expect_same(
                    await asyncio.gather(*(engine.generate(*ask) for ask in asks)), expected
                )
        assert not followers()

    run(both())


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide num_attention_heads"),
        (
            {"pipeline_parallel_size": 8},
            "pipeline_parallel_size 8 is more than num_hidden_layers 7",
        ),
        ({"tensor_parallel_size": 9, "pipeline_parallel_size": 9}, "is over 64"),
        ({"enable_expert_parallel": True}, "needs a tensor_parallel_size or data_parallel_size"),
        ({"tensor_parallel_size": 2, "distributed_timeout_seconds": 0}, "must be above 0, got 0"),
    ],
)
def test_what_cannot_be_divided_starts_no_process(args: dict[str, Any], complaint: str) -> None:
    with pytest.raises((ModelLoadError, ValueError), match=complaint):
        run(answers("tiny", ASKS, **args))
    assert not followers()
