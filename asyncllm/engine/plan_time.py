"""When to plan the next step: late, so that a request that arrives meanwhile is in it.

    device   |        step N         |          step N+1             |
    plan at once    ^ N+1: an arrival from here on waits for step N+2, a whole step more
    plan late                  ^ N+1, a lead before the expected end of N

The expected end is a floor, so that the device is not kept waiting: every forward pass reads all
weights, as the last steps of decodes did, and SHORTEST says how much less than the quickest of them
it may take. One slow step therefore delays nothing, and no wait is longer than MOST_SECONDS.
The lead is what the host then needs: to plan and launch, as it lately took, and to wake up.
"""

from __future__ import annotations

from collections import deque

from asyncllm.engine.stats import StepRecord

SHORTEST = 0.97  # of the quickest of the last NUM_STEPS decode steps
NUM_STEPS = 8
MOST_SECONDS = 0.05
WAKE_SECONDS = 0.4e-3  # the loop may be at work
FORGET = 0.9  # per step, of the longest time that the host took to plan and launch


class PlanTime:
    """Times in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._decode_seconds: deque[float] = deque(maxlen=NUM_STEPS)
        self._device_free: float | None = None  # the end of the last step known to be over
        self._host_seconds = 0.0

    def planned(self, host_seconds: float) -> None:
        """A step was planned and launched, which took the host so long."""
        self._host_seconds = max(host_seconds, self._host_seconds * FORGET)

    def finished(self, step: StepRecord) -> None:
        """The next step in flight has begun to run."""
        self._device_free = step.start + step.duration
        if step.kind == "decode":
            self._decode_seconds.append(step.duration)

    def idle(self) -> None:
        """Nothing is in flight: the next step begins nobody knows when."""
        self._device_free = None

    def seconds_to_wait(self, now: float) -> float:
        """From `now`, before the next plan; 0 where it should be made at once."""
        if self._device_free is None:
            return 0.0
        lead = WAKE_SECONDS + self._host_seconds
        due = self._device_free + SHORTEST * min(self._decode_seconds, default=0.0) - lead
        return min(max(due - now, 0.0), MOST_SECONDS)
