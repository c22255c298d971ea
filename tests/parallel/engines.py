"""Engines of one and of several ranks, asked the same; and the processes of the latter."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams

TOLERANCE = 1e-3  # of log-probabilities, in float32
SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 8,
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "swap_space": 0.001,
}


class Ask(NamedTuple):
    prompt: Any
    params: SamplingParams


def greedy(max_tokens: int = 12, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, **params)


async def answers(model: str | Path, asks: Sequence[Ask], **args: Any) -> list[RequestOutput]:
    """The answers of an engine of its own, all asked at once. No process is left behind."""
    before = followers()
    async with AsyncLLMEngine(str(model), **SMALL | args) as engine:
        outputs = await asyncio.gather(*(engine.generate(*ask) for ask in asks))
        engine.check_idle()
        engine.check_integrity()
        num_ranks = args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1)
        assert len(followers() - before) == num_ranks - 1
    assert followers() == before
    return list(outputs)


def expect_same(ours: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Tokens, and their log-probabilities and those of the prompts, within TOLERANCE."""
    assert len(ours) == len(expected)
    for output, other in zip(ours, expected, strict=True):
        for answer, other_answer in zip(output.outputs, other.outputs, strict=True):
            assert list(answer.token_ids) == list(other_answer.token_ids)
            assert answer.finish_reason == other_answer.finish_reason
            _expect_near(answer.logprobs, other_answer.logprobs)
        _expect_near(output.prompt_logprobs, other.prompt_logprobs)


def _expect_near(ours: Any, expected: Any) -> None:
    assert (ours is None) == (expected is None)
    for entry, other in zip(ours or (), expected or (), strict=True):
        for token, found in (other or {}).items():
            if found.rank == 1 or token in entry:  # of a near tie either may be among the best
                assert entry[token].logprob == pytest.approx(found.logprob, abs=TOLERANCE)


def followers(parent: int | None = None) -> set[int]:
    """Process ids of the ranks beyond the first that live, of this process or another."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                is_follower = b"worker.ranks.follower" in (folder / "cmdline").read_bytes()
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if is_follower and int(fields[1]) == (parent or os.getpid()) and fields[0] != "Z":
                found.add(int(folder.name))
    return found
