"""Times of several implementations of the same, captured in a graph as a step has them.

Launched one by one a kernel costs the device some 3 us more than in a graph, so an implementation
of fewer kernels would look better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from asyncllm.graphs.pool import Graph, GraphPool

ROUNDS = 3
MOST_SPREAD = 1.5  # of one implementation's times; above it the device has another's work too


def captured_seconds(
    implementations: Sequence[Callable[[], object]],
    make_graph: Callable[[], Graph] | None = None,
) -> list[float]:
    """The quickest of ROUNDS of each, in which they alternate. On the current stream, which is not
    the default one, and where nothing is being captured.

    make_graph: for tests, another kind. Raises `RuntimeError` where the device is not theirs alone.
    """
    rounds = _alternated_seconds(
        implementations, GraphPool(make_graph) if make_graph else GraphPool()
    )
    # The graphs are gone, but torch keeps what their pool has, of which nobody else may take.
    torch.cuda.empty_cache()
    return [least(seconds) for seconds in rounds]


def _alternated_seconds(
    implementations: Sequence[Callable[[], object]], pool: GraphPool
) -> list[list[float]]:
    """Seconds of each in each round. Nothing waits between them, so that launching hides behind the
    device as it does in service."""
    replays = [pool.record(partial(_drop_outputs, each))[0].replay for each in implementations]
    for replay in replays:
        replay()  # the first one brings the graph to the device
    timed: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in replays]
    for _ in range(ROUNDS):
        for replay, events in zip(replays, timed, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            events.append((start, end))
    torch.cuda.current_stream().synchronize()  # to read the times
    return [[start.elapsed_time(end) / 1e3 for start, end in events] for events in timed]


def _drop_outputs(implementation: Callable[[], object]) -> tuple[()]:
    implementation()
    return ()


def least(seconds: Sequence[float]) -> float:
    """The quickest round of an implementation. Raises `RuntimeError` where they are too different
    to say anything: what was measured beside another process would be kept for ever."""
    if max(seconds) > MOST_SPREAD * min(seconds):
        us = ", ".join(f"{each * 1e6:.0f}" for each in seconds)
        raise RuntimeError(f"the device has other work: it took {us} us")
    return min(seconds)
