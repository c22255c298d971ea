"""Several implementations of the same, timed against each other, and which of them to keep.

Which is quicker depends on the model, the GPU and the number of rows, so it is measured. The first
stays unless another is clearly quicker: what is as quick must not change between two starts, whose
answers may differ with it in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

LEAST_GAIN = 0.02  # of the first one's time; repeated measurements differ by less


def alternated_seconds(
    implementations: Sequence[Callable[[], object]],
    num_rounds: int,
    prepare: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Seconds of each in each round, in which they alternate, on the current stream.

    Nothing waits between them, so that launching hides behind the device as it does in service.
    `prepare` comes before each, untimed.
    """
    timed: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in implementations]
    for _ in range(num_rounds):
        for implementation, events in zip(implementations, timed, strict=True):
            prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            implementation()
            end.record()
            events.append((start, end))
    torch.cuda.current_stream().synchronize()  # to read the times
    return [[start.elapsed_time(end) / 1e3 for start, end in events] for events in timed]


def quickest(seconds: Sequence[float]) -> int:
    """Whose time it is; 0 where no other is clearly quicker than the first."""
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return best if seconds[best] < seconds[0] * (1 - LEAST_GAIN) else 0
