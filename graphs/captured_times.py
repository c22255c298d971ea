"""What several ways to do the same take in a captured graph, as a step has them.

Launched one by one a kernel costs the device some 3 us more than in a graph, so a way of fewer
kernels would look better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from asyncllm.attention.device_trial import seconds_by_turns
from asyncllm.graphs.pool import Graph, GraphPool

ROUNDS = 3
MOST_SPREAD = 1.5  # of the times of one way; above it the device has another's work too


def captured_seconds(
    ways: Sequence[Callable[[], object]], make_graph: Callable[[], Graph] | None = None
) -> list[float]:
    """Of each, the quickest of ROUNDS in which they take turns. On the current stream, which is not
    the default one, and where nothing is being captured.

    make_graph: for tests, another kind. Raises `RuntimeError` where the device is not theirs alone.
    """
    rounds = _seconds_of_rounds(ways, GraphPool() if make_graph is None else GraphPool(make_graph))
    # The graphs are gone, but torch keeps what their pool has, of which nobody else may take.
    torch.cuda.empty_cache()
    return [least(seconds) for seconds in rounds]


def _seconds_of_rounds(ways: Sequence[Callable[[], object]], pool: GraphPool) -> list[list[float]]:
    replays = [pool.record(partial(_drop_outputs, way))[0].replay for way in ways]
    for replay in replays:
        replay()  # the first one brings the graph to the device
    return seconds_by_turns(replays, ROUNDS)


def _drop_outputs(way: Callable[[], object]) -> tuple[()]:
    way()
    return ()


def least(seconds: Sequence[float]) -> float:
    """Of one way's rounds. Raises `RuntimeError` where they are too different to say anything: what
    was measured beside another process would be kept for ever."""
    if max(seconds) > MOST_SPREAD * min(seconds):
        us = ", ".join(f"{each * 1e6:.0f}" for each in seconds)
        raise RuntimeError(f"the device has other work: it took {us} us")
    return min(seconds)
