"""Scheduler, block manager and pipeline against a slow oracle, by the ten thousand steps.

The device reads every context through the block tables, so the text of a sequence is right only if
all its pages were (`fake_device.py`). The oracle computes the same text without pages
(`oracle.py`). Every world (`random_world.py`) runs one step ahead and synchronously, one of four as
a pipeline of two or three stages does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter

import pytest

from asyncllm.engine import chunk_policy as policy_module
from asyncllm.engine import prefill_planner as planner_module
from asyncllm.engine import scheduler as scheduler_module
from tests.engine.random_world import World

FIXED_SEEDS = range(1000, 1008)
NUM_STEPS_PER_SEED = 2_600  # of each of the two pipelines
NUM_STEPS_IN_ALL = 20_000  # of each of the two pipelines

MUST_HAPPEN = (
    "swap preemption",
    "recompute preemption",
    "preemption of a prefill",
    "prefix hit",
    "prefix hit of an output",
    "host hit",
    "swapped page still on the device",
    "copy on write",
    "fork",
    "fork without a slot",
    "chunked prefill",
    "chunk beside decodes",
    "short prompt before a long one",
    "wasted row",
    "jump",
    "stop string amid a jump",
    "preemption of a jump",
    "finished while preempted",
    "finish stop",
    "finish length",
    "finish by the output processor",
    "abort unforked",
    "abort waiting",
    "abort preempted",
    "abort swapped",
    "abort preempted, in flight",
    "abort swapped, in flight",
    "abort prefilling",
    "abort decoding",
    "abort decoding, in flight",
    "cache reset",
    "page left behind",
    "hit behind a window",
    "state swapped",
    "state from a snapshot",
    "state forked",
    "state of an answer found",
    "state of an answer saved",
    "two snapshots of a chunk",
)


def run_worlds(seed: int, num_steps: int) -> tuple[Counter[str], int, int]:
    """Worlds from `seed` on until both pipelines have done `num_steps`; what happened in them."""
    seen: Counter[str] = Counter()
    watermark, end_share = planner_module.FREE_PAGES_WATERMARK, policy_module.END_SHARE
    saved_blocks = scheduler_module.SAVED_BLOCKS
    num_ahead = num_synchronous = 0
    try:
        while min(num_ahead, num_synchronous) < num_steps:
            ahead, synchronous = (World(seed, pipeline, seen) for pipeline in (True, False))
            for world in (ahead, synchronous):
                asyncio.run(world.run())
            if seed % 4 == 0:
                asyncio.run(World(seed, True, seen, num_sets=2 + seed % 8 // 4).run())
            num_ahead += ahead.num_steps
            num_synchronous += synchronous.num_steps
            seed += 1
    except BaseException:
        print(f"failed in the world of seed {seed}")
        raise
    finally:
        planner_module.FREE_PAGES_WATERMARK, policy_module.END_SHARE = watermark, end_share
        scheduler_module.SAVED_BLOCKS = saved_blocks
    return seen, num_ahead, num_synchronous


@pytest.mark.slow
def test_every_text_is_the_oracles() -> None:
    seen: Counter[str] = Counter()
    num_ahead = num_synchronous = 0
    for seed in FIXED_SEEDS:
        more, ahead, synchronous = run_worlds(seed * 1000, NUM_STEPS_PER_SEED)
        seen += more
        num_ahead += ahead
        num_synchronous += synchronous
    assert num_ahead >= NUM_STEPS_IN_ALL and num_synchronous >= NUM_STEPS_IN_ALL
    missing = [event for event in MUST_HAPPEN if not seen[event]]
    assert not missing, f"never happened: {missing}; did: {dict(seen)}"


def test_a_seed_of_today() -> None:
    seed = secrets.randbelow(2**31)
    print(f"random seed {seed}: run_worlds({seed}, 1)")
    run_worlds(seed, 1_000)
