"""Chunked prefill: how many prompt tokens a step takes, with running decodes and without.

Up to a number of tokens, the *knee*, a step's GEMMs are bound by reading the weights, so the first
prompt tokens in a step of decodes are free; beyond it each token adds its own time. A chunk of
CHUNK_KNEES keeps inter-token latency near that of two decode steps and computes at full speed. The
knee is measured, so the rule fits all models and GPUs; one below what GPUs have is corrected. On a
small model so many tokens take so little time that a prompt would need many steps, each with the
host's cost of a launch: there a chunk is as much as LEAST_SECONDS compute, up to the largest
captured size. Chunk and decodes together fill the nearest captured size that is a multiple of a
GEMM's tile: 656 tokens cost nearly as much as 768. `ChunkPolicy.budget` has the exceptions.
The rule was chosen with `scripts/simulate_schedule.py`; docs/log/scheduling.md has alternatives.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from asyncllm.types import StepCost

# 8B models on one, two and four GPUs, in 16 bits and FP8, get 330 to 480 tokens by this: far from
# where rounding changes (281 and 537), so noise does not decide between two chunks.
CHUNK_KNEES = 1.8
# A 16-bit weight is two bytes and takes two operations per token, so the knee is FLOP/s divided by
# B/s: by data sheets 153 on an A100, 206 on an H200, 295 on an H100 (an 8B model measured 267).
LEAST_KNEE_TOKENS = 128
LEAST_SECONDS = 4e-3  # of prompt tokens: such a short delay between two tokens is unnoticed
CHUNK_MULTIPLE = 256  # so that measurement noise does not change the steps
SLACK = 0.1  # share of a CHUNK_MULTIPLE that is rounded down
DRAIN_STEPS = 128
BACKLOG_CHUNKS = 8  # chunks that wait, remainders of begun prompts included
END_SHARE = 32  # a prompt's last tokens may exceed the chunk by 1 / END_SHARE
TILE_TOKENS = 128  # tokens of a GEMM's tile


class PrefillBudget(NamedTuple):
    """The most prompt tokens of a step."""

    num_tokens: int
    to_end: int = 0  # additional tokens for the first prompt, if it ends with them
    shared: int = sys.maxsize  # the most tokens of a step with several prompts


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """chunk_tokens: prompt tokens in steps with decodes, without a backlog. None: no limit.

    step_sizes: token counts of captured steps that chunks should fill, ascending.
    """

    chunk_tokens: int | None
    step_sizes: tuple[int, ...] = ()

    @classmethod
    def choose(
        cls, asked: int | None, cost: StepCost | None, step_sizes: tuple[int, ...] = ()
    ) -> ChunkPolicy:
        """The number that the user asked for, else a measured one, else no limit.

        step_sizes: token counts of all captured steps.
        """
        step_sizes = tuple(size for size in step_sizes if size % TILE_TOKENS == 0)
        if asked is None and cost is not None:
            return cls(cls.measured(cost, step_sizes).chunk_tokens, step_sizes)
        return cls(asked)

    @classmethod
    def measured(cls, cost: StepCost, step_sizes: tuple[int, ...] = ()) -> ChunkPolicy:
        """CHUNK_KNEES, or LEAST_SECONDS, rounded up to a CHUNK_MULTIPLE."""
        seconds_per_token = min(cost.seconds_per_token, cost.seconds_per_step / LEAST_KNEE_TOKENS)
        num_tokens = CHUNK_KNEES * cost.seconds_per_step / seconds_per_token
        if step_sizes:  # leaves room for decodes
            most = step_sizes[-1] - CHUNK_MULTIPLE
            num_tokens = max(num_tokens, min(LEAST_SECONDS / seconds_per_token, most))
        return cls(max(1, ceil(num_tokens / CHUNK_MULTIPLE - SLACK)) * CHUNK_MULTIPLE)

    def budget(self, num_decodes: int, num_startable: int, begun: list[int]) -> PrefillBudget:
        """The prompt tokens of one step.

        num_decodes: its tokens of decoding sequences. num_startable: waiting prompt tokens that
        could be admitted. begun: the remaining tokens of each prompt that has begun, oldest first.
        """
        chunk = self.chunk_tokens
        if chunk is None:
            return PrefillBudget(sys.maxsize)
        num_waiting = num_startable + sum(begun)
        # Prompts computed together finish hardly sooner, and their next requests arrive together.
        shared = chunk // 2 if num_waiting <= chunk else None
        if num_decodes == 0:
            return PrefillBudget(sys.maxsize, shared=shared or chunk)
        num_tokens, to_end = self._beside(num_decodes, chunk, num_startable), 0
        if self.step_sizes:
            if begun and begun[0] > num_tokens and num_waiting >= BACKLOG_CHUNKS * chunk:
                # One and a half chunks: fewer steps read the weights and the decodes' KV.
                size = self._nearest_size(min(chunk + chunk // 2, self.step_sizes[-1]), 0)
                num_tokens = max(num_tokens, size - num_decodes)
            # Decodes should not push the last few tokens of a prompt into another step.
            most = min(chunk + chunk // END_SHARE, self.step_sizes[-1])
            to_end = max(0, most - num_decodes - num_tokens)
        return PrefillBudget(num_tokens, to_end, shared or sys.maxsize)

    def _beside(self, num_decodes: int, chunk: int, num_startable: int) -> int:
        """A chunk, or 1 / DRAIN_STEPS of what could start, rounded to the nearest step size."""
        num_tokens = num_decodes + chunk
        if self.step_sizes and num_tokens > self.step_sizes[-1] >= num_decodes + CHUNK_MULTIPLE:
            num_tokens = self.step_sizes[-1]  # a smaller chunk is better than an eager step
        num_tokens = max(num_tokens, num_decodes + num_startable // DRAIN_STEPS)
        least = min(num_tokens, num_decodes + chunk // 2)
        return max(1, self._nearest_size(num_tokens, least) - num_decodes)

    def _nearest_size(self, num_tokens: int, least: int) -> int:
        """The captured size nearest to `num_tokens`, not below `least`, so that some prompt tokens
        fit even if few sizes are captured."""
        place = bisect_left(self.step_sizes, num_tokens)
        if place == len(self.step_sizes):
            return num_tokens  # an eager step, without padding
        sizes = self.step_sizes[max(0, place - 1) : place + 1]
        return min(
            (size for size in sizes if size >= least), key=lambda size: abs(size - num_tokens)
        )


UNBOUNDED = ChunkPolicy(None)
