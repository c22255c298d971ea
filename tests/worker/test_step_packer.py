"""Steps as arrays: what a packer keeps from the step before changes nothing of what it builds."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from asyncllm.step_plan import StepPlan
from asyncllm.types import StepResult
from asyncllm.worker.packed_step import NO_CHANGES, NO_EXTRAS, PackedStep
from asyncllm.worker.step_packer import StepPacker
from tests.engine.builders import make_request, make_scheduler

MAX_SEQS = 6


def as_lists(value: Any) -> Any:
    """In a form that compares, whatever records are in it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        value = tuple(getattr(value, f.name) for f in fields(value))
    return [as_lists(each) for each in value] if isinstance(value, tuple) else value


def forget(packer: StepPacker) -> None:
    packer._decode_slots = np.empty(0, np.int32)  # no step's array


def test_a_packer_that_remembers_builds_what_one_that_forgets_does() -> None:
    """Random requests come and go; each step is built twice."""
    rng = random.Random(0)
    scheduler = make_scheduler(
        num_pages=40, num_host_pages=20, max_num_seqs=MAX_SEQS, max_num_batched_tokens=12
    )
    remembers, forgets = StepPacker(MAX_SEQS + 1, 4), StepPacker(MAX_SEQS + 1, 4)
    num_shared = number = 0
    last: PackedStep | None = None
    in_flight: StepPlan | None = None
    for _ in range(600):
        if rng.random() < 0.05 or not scheduler.num_requests:
            number += 1
            options = rng.choice([{}, {"logprobs": 2}, {"logit_bias": {3: 1.0}}, {"n": 2}])
            prompt = range(rng.randint(1, 20))
            temperature = rng.choice([0, 1])
            scheduler.add(
                make_request(number, prompt, max_tokens=60, temperature=temperature, **options)
            )
        plan = scheduler.plan()
        if plan is not None:
            forget(forgets)
            inputs = remembers.pack(plan)
            assert as_lists(inputs) == as_lists(forgets.pack(plan))
            num_shared += last is not None and last.decode_slots is inputs.decode_slots
            last = inputs
        if in_flight is not None:
            scheduler.finish_step(in_flight, StepResult([7] * len(in_flight.sampled)))
        in_flight = plan
    assert num_shared > 200


def test_the_same_decodes_build_no_array() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    packer = StepPacker(3, 4)
    scheduler.add(make_request(1, [1, 2, 3]))
    slots = []
    for _ in range(6):
        plan = scheduler.plan()
        assert plan is not None
        inputs = packer.pack(plan)
        slots.append(inputs.decode_slots)
        scheduler.finish_step(plan, StepResult([7] * len(plan.sampled)))
        if not plan.prefills and not plan.page_appends:
            assert inputs.extras is NO_EXTRAS and inputs.changes is NO_CHANGES
    assert all(array is slots[1] for array in slots[2:]), "slots[0]: the prefill's"
