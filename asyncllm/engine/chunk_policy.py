"""How many prompt tokens a step takes beside running decodes.

Up to the *knee* a step's matrix products last as long as reading the weights, so its first prompt
tokens cost its decodes nothing; beyond it every token adds its own time. A chunk of two knees keeps
the gap between two tokens near two bare steps and wastes nothing of the device: it is computed at
full speed, and the decodes ride along. The knee is measured, so the rule holds for every model and
card. Chosen with `scripts/simulate_schedule.py`; docs/LOG.md has the alternatives.
"""

from __future__ import annotations

from asyncllm.types import StepCost

CHUNK_KNEES = 2.0
CHUNK_MULTIPLE = 256  # the noise of a measurement should not change the steps


def chunk_tokens(cost: StepCost) -> int:
    """Prompt tokens beside running decodes, a multiple of CHUNK_MULTIPLE."""
    knee = cost.seconds_per_step / cost.seconds_per_token
    return max(1, round(CHUNK_KNEES * knee / CHUNK_MULTIPLE)) * CHUNK_MULTIPLE
