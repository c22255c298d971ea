"""A pool's graphs, once their owner lets go of them."""

from __future__ import annotations

import torch

from asyncllm.graphs.pool import GraphPool
from tests.worker.recorded_graph import RecordedGraph


def test_a_reset_reaches_graphs_that_others_hold() -> None:
    """NCCL closes when no graph has a call of it, be it one that a step still refers to."""
    pool, x = GraphPool(RecordedGraph), torch.zeros(2)
    held = pool.record(lambda: (x.add_(1),))
    held.replay()
    before = x.clone()
    pool.reset()
    held.replay()
    assert torch.equal(x, before)
