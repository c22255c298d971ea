"""Times alternative implementations in CUDA graphs, as steps run them.

Outside a graph each kernel costs some 3 us more, so an implementation with fewer kernels would look
better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from asyncllm.graphs.pool import Graph, GraphPool

ROUNDS = 3
MOST_SPREAD = 1.5  # ratio of an implementation's times; above it, the device has other work


def captured_seconds(
    implementations: Sequence[Callable[[], object]],
    make_graph: Callable[[], Graph] | None = None,
) -> list[float]:
    """The shortest time of each in ROUNDS, in which they alternate. On the current stream, which
    must not be the default one or be captured.

    make_graph: a replacement for tests. Raises `RuntimeError` if the device has other work.
    """
    rounds = _alternated_seconds(
        implementations, GraphPool(make_graph) if make_graph else GraphPool()
    )
    # torch keeps the memory of the graphs' pool, which is of no use to others.
    torch.cuda.empty_cache()
    return [least(seconds) for seconds in rounds]


def _alternated_seconds(
    implementations: Sequence[Callable[[], object]], pool: GraphPool
) -> list[list[float]]:
    """Seconds of each in each round. Nothing waits in between, so launches overlap with the
    device's work, as they do in use."""
    replays = [pool.record(partial(_drop_outputs, each))[0].replay for each in implementations]
    for replay in replays:
        replay()  # the first replay uploads the graph
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
    """The shortest time of an implementation. Raises `RuntimeError` if the times differ too much:
    the result is cached, so it must not be measured beside another process."""
    if max(seconds) > MOST_SPREAD * min(seconds):
        us = ", ".join(f"{each * 1e6:.0f}" for each in seconds)
        raise RuntimeError(f"the device has other work: it took {us} us")
    return min(seconds)
