"""When the device worked on a step, in the host's clock, without waiting for the device.

The CPU's thread notes its own times. On CUDA two timing events stand around each step; once the
step's end has been seen they are read, which synchronises nothing. Events know durations, not times
of day: an end is placed by the end before it, `elapsed_time` later, and never after the moment at
which the host saw it. So durations and gaps are the device's own (events resolve 0.5 us), and a
place in time is late by no more than the promptest sight of a recent step (a thread's wake-up,
about 0.1 ms). What lies between the events counts as busy, gaps between kernels included.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

CLOCK_DRIFT = 1e-4  # the device's clock may be this much slower than the host's


@dataclass(slots=True)
class DeviceTimes:
    """Seconds of `time.monotonic()`; valid once the step's results are known."""

    started: float = 0.0
    ended: float = 0.0


class StreamClock:
    """Places the ends of one stream's steps in the host's time, in the order of the steps."""

    def __init__(self) -> None:
        self._last: tuple[torch.cuda.Event, float] | None = None

    def place(self, end: torch.cuda.Event, seen: float) -> float:
        """When `end` happened, which the host saw at `seen`."""
        ended = seen
        if self._last is not None:
            before, ended_before = self._last
            seconds = before.elapsed_time(end) / 1e3
            ended = min(seen, ended_before + seconds * (1 + CLOCK_DRIFT))
        self._last = (end, ended)
        return ended


class StepTimer:
    """One step between two events. `start` is recorded here, on its stream."""

    def __init__(self, clock: StreamClock, stream: torch.cuda.Stream) -> None:
        self._clock = clock
        self.submitted_s = time.perf_counter()
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record(stream)  # said, not looked up: that takes longer
        self._seen: float | None = None

    def see(self) -> None:
        """The host has seen the end just now."""
        self._seen = time.monotonic()

    def times(self, end: torch.cuda.Event) -> DeviceTimes:
        """`end` (a timing event) closes the step; it has been seen."""
        assert self._seen is not None, "device times of a step that has not ended"
        ended = self._clock.place(end, self._seen)
        return DeviceTimes(ended - self._start.elapsed_time(end) / 1e3, ended)
