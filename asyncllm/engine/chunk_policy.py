"""How many prompt tokens a step takes, beside running decodes and on an idle device.

Up to the *knee* a step's GEMMs last as long as reading the weights, so its first prompt
tokens cost its decodes nothing; beyond it every token adds its own time. A chunk of two knees keeps
the gap between two tokens near two bare steps and is computed at full speed. The knee is measured,
so the rule holds for every model and GPU; one that is below what GPUs have is not believed. On a
small model two knees are over in a moment and prompts take many steps, each of which costs the host
a launch: there the chunk is what LEAST_SECONDS compute, as far as captured sizes reach. Chunk and
decodes together fill a captured size, the nearest of those that GEMMs compute without a
remainder: 656 tokens cost nearly what 768 do. `ChunkPolicy.room` has the exceptions.
Chosen with `scripts/simulate_schedule.py`; docs/log/scheduling.md has the alternatives.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from asyncllm.types import StepCost

CHUNK_KNEES = 2.0
# A 16-bit weight is two bytes and two operations a token, so a knee is a GPU's FLOP/s by its B/s:
# by data sheets 153 on an A100, 206 on an H200, 295 on an H100 (where the 8B measured 267).
LEAST_KNEE_TOKENS = 128
LEAST_SECONDS = 4e-3  # of prompt tokens: so short a gap between two tokens disturbs nobody
CHUNK_MULTIPLE = 256  # the noise of a measurement should not change the steps
SLACK = 0.1  # of a CHUNK_MULTIPLE: so little above one is not worth the next
DRAIN_STEPS = 128
BACKLOG_CHUNKS = 8  # that wait, what is left of begun prompts among them
END_SHARE = 32  # of a chunk, beyond it, for a prompt's last tokens
TILE_TOKENS = 128  # that GEMMs compute at once


class Room(NamedTuple):
    """Prompt tokens that a step takes at most."""

    num_tokens: int
    to_end: int = 0  # more, of its first prompt, where that ends with them
    shared: int = sys.maxsize  # of all its prompts, for any but the first


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """`chunk_tokens`: of prompts beside decodes, where little waits. None: no bound.

    `step_sizes`: tokens of captured steps that chunks are to fill, ascending.
    """

    chunk_tokens: int | None
    step_sizes: tuple[int, ...] = ()

    @classmethod
    def choose(
        cls, asked: int | None, cost: StepCost | None, step_sizes: tuple[int, ...] = ()
    ) -> ChunkPolicy:
        """The user's number exactly, else the device's by measurement, else no bound.

        step_sizes: tokens of all captured steps.
        """
        step_sizes = tuple(size for size in step_sizes if size % TILE_TOKENS == 0)
        if asked is None and cost is not None:
            return cls(cls.measured(cost, step_sizes).chunk_tokens, step_sizes)
        return cls(asked)

    @classmethod
    def measured(cls, cost: StepCost, step_sizes: tuple[int, ...] = ()) -> ChunkPolicy:
        """Two knees or LEAST_SECONDS, rounded up to a CHUNK_MULTIPLE: smaller steps are slower."""
        seconds_per_token = min(cost.seconds_per_token, cost.seconds_per_step / LEAST_KNEE_TOKENS)
        num_tokens = CHUNK_KNEES * cost.seconds_per_step / seconds_per_token
        if step_sizes:  # with room for decodes
            most = step_sizes[-1] - CHUNK_MULTIPLE
            num_tokens = max(num_tokens, min(LEAST_SECONDS / seconds_per_token, most))
        return cls(max(1, ceil(num_tokens / CHUNK_MULTIPLE - SLACK)) * CHUNK_MULTIPLE)

    def room(self, num_decodes: int, num_startable: int, begun: list[int]) -> Room:
        """The prompt tokens that one step takes.

        num_decodes: its tokens of sequences that are being answered. num_startable: prompt tokens
        that wait and have room. begun: tokens that are left of each prompt that has begun, oldest
        first.
        """
        chunk = self.chunk_tokens
        if chunk is None:
            return Room(sys.maxsize)
        num_waiting = num_startable + sum(begun)
        # Together they are hardly done sooner, and who is answered together comes again together.
        shared = chunk // 2 if num_waiting <= chunk else None
        if num_decodes == 0:
            return Room(sys.maxsize, shared=shared or chunk)
        num_tokens, to_end = self._beside(num_decodes, chunk, num_startable), 0
        if self.step_sizes:
            if begun and begun[0] > num_tokens and num_waiting >= BACKLOG_CHUNKS * chunk:
                # Half more: fewer steps read the weights and the contexts of the decodes.
                size = self._nearest_size(min(chunk + chunk // 2, self.step_sizes[-1]), 0)
                num_tokens = max(num_tokens, size - num_decodes)
            # The last few tokens of a prompt take no step because of the decodes alone.
            most = min(chunk + chunk // END_SHARE, self.step_sizes[-1])
            to_end = max(0, most - num_decodes - num_tokens)
        return Room(num_tokens, to_end, shared or sys.maxsize)

    def _beside(self, num_decodes: int, chunk: int, num_startable: int) -> int:
        """A chunk, or a DRAIN_STEPS-th of what could start, as the nearest size has it."""
        num_tokens = num_decodes + chunk
        if self.step_sizes and num_tokens > self.step_sizes[-1] >= num_decodes + CHUNK_MULTIPLE:
            num_tokens = self.step_sizes[-1]  # rather less of the prompts than an eager step
        num_tokens = max(num_tokens, num_decodes + num_startable // DRAIN_STEPS)
        least = min(num_tokens, num_decodes + chunk // 2)
        return max(1, self._nearest_size(num_tokens, least) - num_decodes)

    def _nearest_size(self, num_tokens: int, least: int) -> int:
        """`least`: where few sizes are captured, the nearest may leave prompts next to nothing."""
        place = bisect_left(self.step_sizes, num_tokens)
        if place == len(self.step_sizes):
            return num_tokens  # not captured, and not padded
        sizes = self.step_sizes[max(0, place - 1) : place + 1]
        return min(
            (size for size in sizes if size >= least), key=lambda size: abs(size - num_tokens)
        )


UNBOUNDED = ChunkPolicy(None)
