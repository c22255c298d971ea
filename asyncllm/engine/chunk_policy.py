"""How many prompt tokens a step takes beside running decodes.

Up to the *knee* a step's matrix products last as long as reading the weights, so its first prompt
tokens cost its decodes nothing; beyond it every token adds its own time. A chunk of two knees keeps
the gap between two tokens near two bare steps and wastes nothing of the device: it is computed at
full speed, and the decodes ride along. The knee is measured, so the rule holds for every model and
card. Where more could start than DRAIN_STEPS such steps compute, the chunk grows.
Chosen with `scripts/simulate_schedule.py`; docs/LOG.md has the alternatives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from asyncllm.types import StepCost

CHUNK_KNEES = 2.0
CHUNK_MULTIPLE = 256  # the noise of a measurement should not change the steps
DRAIN_STEPS = 128


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """`chunk_tokens`: of prompts beside decodes, where little waits. None: no bound."""

    chunk_tokens: int | None

    @classmethod
    def choose(cls, asked: int | None, cost: StepCost | None) -> ChunkPolicy:
        """What the user asked for, else what the device measured, else no bound."""
        return cls.measured(cost) if asked is None and cost is not None else cls(asked)

    @classmethod
    def measured(cls, cost: StepCost) -> ChunkPolicy:
        """Two knees, a multiple of CHUNK_MULTIPLE."""
        knee = cost.seconds_per_step / cost.seconds_per_token
        return cls(max(1, round(CHUNK_KNEES * knee / CHUNK_MULTIPLE)) * CHUNK_MULTIPLE)

    def most_prompt_tokens(self, num_decodes: int, num_startable_tokens: int) -> int:
        """Of one step, while prompts of `num_startable_tokens` wait and have room."""
        if num_decodes == 0 or self.chunk_tokens is None:
            return sys.maxsize
        return max(self.chunk_tokens, num_startable_tokens // DRAIN_STEPS)


UNBOUNDED = ChunkPolicy(None)
