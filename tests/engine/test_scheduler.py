"""Who runs in the next step: one rule a test. The random tests are in test_scheduler_random.py."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import asyncllm.types
from asyncllm.engine.chunk_policy import (
    CHUNK_MULTIPLE,
    DRAIN_STEPS,
    LEAST_KNEE_TOKENS,
    UNBOUNDED,
    ChunkPolicy,
)
from asyncllm.engine.prefill_planner import StepDraft
from asyncllm.engine.scheduler import PUBLISHED_BLOCKS, Scheduler
from asyncllm.outputs import FinishReason
from asyncllm.step_plan import PageAppend, StepPlan
from asyncllm.types import (
    Request,
    Sequence,
    SequenceStatus,
    StepCost,
    StepResult,
    SwapCost,
    TokenLogprobs,
)
from tests.engine.builders import (
    finish,
    make_request,
    make_scheduler,
    pages_of,
    run_step,
    scheduled_requests,
)


def decoding(plan: StepPlan | None) -> list[str]:
    assert plan is not None
    return [seq.request.request_id for seq in plan.decodes.seqs]


def prefilling(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """(request, first position, number of tokens) of each prefill row."""
    assert plan is not None
    return [(r.seq.request.request_id, r.start, len(r.token_ids)) for r in plan.prefills]


def add(scheduler: Scheduler, request: Request) -> Sequence:
    scheduler.add(request)
    return request.sequences[0]


# --- the budget ----------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan() -> None:
    assert make_scheduler().plan() is None


def test_a_long_prompt_is_computed_in_chunks_and_samples_at_its_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    seq = add(scheduler, make_request(1, range(10)))
    plans = [run_step(scheduler) for _ in range(4)]
    assert [prefilling(plan) for plan in plans[:3]] == [
        [("r1", 0, 4)],
        [("r1", 4, 4)],
        [("r1", 8, 2)],
    ]
    assert [plan.sampled for plan in plans] == [(), (), (seq,), (seq,)]
    assert [len(plan.prefills[0].block_ids[0]) for plan in plans[:3]] == [1, 2, 3]
    assert decoding(plans[3]) == ["r1"] and plans[3].decodes.positions[0] == 10


def test_decodes_come_first_and_the_oldest_prefill_takes_what_is_left() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, make_request(1, range(4)))
    run_step(scheduler)
    add(scheduler, make_request(2, range(10, 20)))
    add(scheduler, make_request(3, range(20, 30)))
    plan = run_step(scheduler)
    assert decoding(plan) == ["r1"] and prefilling(plan) == [("r2", 0, 7)]
    plan = run_step(scheduler)
    assert decoding(plan) == ["r1"] and prefilling(plan) == [("r2", 7, 3), ("r3", 0, 4)]


def test_a_prefill_goes_on_beside_decodes_even_with_the_smallest_budget() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=3)
    for number in (1, 2):
        add(scheduler, make_request(number, [number], max_tokens=50))
    run_step(scheduler)
    add(scheduler, make_request(3, range(5)))
    chunks = [prefilling(run_step(scheduler)) for _ in range(5)]
    assert chunks == [[("r3", i, 1)] for i in range(5)]


# --- the chunk beside decodes --------------------------------------------------------------------


def with_a_decode(chunk: int | ChunkPolicy | None, **options: Any) -> Scheduler:
    """r1 decodes from the next step on."""
    policy = chunk if isinstance(chunk, ChunkPolicy) else ChunkPolicy(chunk)
    scheduler = make_scheduler(chunk_policy=policy, **options)
    add(scheduler, make_request(1, range(4), max_tokens=1000))
    assert prefilling(run_step(scheduler)) == [("r1", 0, 4)]
    return scheduler


def test_where_nothing_decodes_the_first_prompt_is_computed_at_once() -> None:
    """Others join it up to a chunk, and while no more than a chunk waits up to half of one."""
    for lengths, first_step in [
        ((50, 40), [("r1", 0, 50)]),
        ((3, 3, 3), [("r1", 0, 3), ("r2", 0, 3), ("r3", 0, 2)]),
        ((3, 3), [("r1", 0, 3), ("r2", 0, 1)]),
        ((5, 3), [("r1", 0, 5)]),
    ]:
        scheduler = make_scheduler(chunk_policy=ChunkPolicy(8))
        for number, length in enumerate(lengths, 1):
            add(scheduler, make_request(number, range(100 * number, 100 * number + length)))
        assert prefilling(run_step(scheduler)) == first_step


def test_prompts_share_a_chunk_beside_decodes() -> None:
    scheduler = with_a_decode(8)
    for number in (2, 3, 4):
        add(scheduler, make_request(number, range(10 * number, 10 * number + 6)))
    chunks = [prefilling(run_step(scheduler)) for _ in range(3)]
    assert chunks == [[("r2", 0, 6), ("r3", 0, 2)], [("r3", 2, 4), ("r4", 0, 4)], [("r4", 4, 2)]]


def test_few_prompts_share_half_a_chunk_beside_decodes() -> None:
    """One alone takes all of it."""
    scheduler = with_a_decode(8)
    for number in (2, 3):
        add(scheduler, make_request(number, range(10 * number, 10 * number + 4)))
    chunks = [prefilling(run_step(scheduler)) for _ in range(2)]
    assert chunks == [[("r2", 0, 4)], [("r3", 0, 4)]]
    add(scheduler, make_request(4, range(90, 98)))
    assert prefilling(run_step(scheduler)) == [("r4", 0, 8)]


def test_no_chunk_is_no_bound_but_the_steps() -> None:
    scheduler = with_a_decode(None, max_num_batched_tokens=60)
    add(scheduler, make_request(2, range(100, 190)))
    assert prefilling(run_step(scheduler)) == [("r2", 0, 59)]


def test_the_chunk_grows_where_much_waits() -> None:
    scheduler = with_a_decode(2, num_pages=1000, max_num_batched_tokens=100)
    for number in range(2, 5):
        add(scheduler, make_request(number, range(1000 * number, 1000 * number + 2 * DRAIN_STEPS)))
    assert prefilling(run_step(scheduler)) == [("r2", 0, 6)], "2 * 3 * DRAIN_STEPS tokens wait"
    assert prefilling(run_step(scheduler)) == [("r2", 6, 4)]


@pytest.mark.parametrize(("max_num_seqs", "num_pages"), [(2, 1000), (4, 120)])
def test_the_chunk_does_not_grow_for_who_has_no_room(max_num_seqs: int, num_pages: int) -> None:
    """One free slot, or pages for one of them: a larger chunk would start none of them earlier."""
    scheduler = with_a_decode(3, num_pages=num_pages, max_num_seqs=max_num_seqs)
    for number in range(2, 5):
        add(scheduler, make_request(number, range(1000 * number, 1000 * number + 3 * DRAIN_STEPS)))
    assert prefilling(run_step(scheduler)) == [("r2", 0, 3)]


def test_short_prompts_pass_a_long_one_in_half_of_its_chunk() -> None:
    scheduler = with_a_decode(8, max_num_seqs=6)
    add(scheduler, make_request(2, range(100, 120)))
    assert prefilling(run_step(scheduler)) == [("r2", 0, 8)]
    add(scheduler, make_request(3, range(200, 203)))
    add(scheduler, make_request(4, range(300, 303)))  # one token of the half is left: not enough
    assert prefilling(run_step(scheduler)) == [("r3", 0, 3), ("r2", 8, 5)]
    assert prefilling(run_step(scheduler)) == [("r2", 13, 7), ("r4", 0, 1)], "r2 ends: no haste"


def test_a_long_prompt_does_not_pass_another() -> None:
    scheduler = with_a_decode(8)
    add(scheduler, make_request(2, range(100, 120)))
    run_step(scheduler)
    add(scheduler, make_request(3, range(200, 220)))
    assert prefilling(run_step(scheduler)) == [("r2", 8, 8)]


def test_the_measured_chunk_is_nearly_two_knees() -> None:
    """An 8B model on an H100: 6 ms a step, 22.5 us a prompt token; then a 0.6B model."""
    assert ChunkPolicy.measured(StepCost(6.0e-3, 22.5e-6)) == ChunkPolicy(512)
    assert ChunkPolicy.measured(StepCost(1.4e-3, 1.85e-6)) == ChunkPolicy(1536)
    assert ChunkPolicy.measured(StepCost(1e-6, 1.0)) == ChunkPolicy(CHUNK_MULTIPLE)


def test_a_small_models_chunk_takes_some_milliseconds() -> None:
    """0.6B: on an H200, on a faster card, with few sizes; the 8B's knees take longer."""
    sizes = tuple(range(256, 2049, 256))
    chunks = {
        StepCost(0.9e-3, 2.75e-6): 1536,
        StepCost(0.9e-3, 1.00e-6): 1792,  # 4000 would leave the captured sizes
        StepCost(6.0e-3, 22.5e-6): 512,
    }
    for cost, num_tokens in chunks.items():
        assert ChunkPolicy.choose(None, cost, sizes) == ChunkPolicy(num_tokens, sizes)
    few = (256, 512)
    assert ChunkPolicy.choose(None, StepCost(0.9e-3, 2.75e-6), few) == ChunkPolicy(768, few)


def test_a_knee_that_no_card_has_is_not_believed() -> None:
    """However slow a token was found: the least knee counts, and what 4 ms of it are."""
    assert ChunkPolicy.measured(StepCost(6.0e-3, 1.0)) == ChunkPolicy(2 * LEAST_KNEE_TOKENS)
    sizes = tuple(range(256, 2049, 256))
    assert ChunkPolicy.measured(StepCost(0.9e-3, 1.0), sizes) == ChunkPolicy(768)


def test_what_the_user_asks_for_wins_over_what_is_measured() -> None:
    cost = StepCost(6.0e-3, 22.5e-6)
    assert ChunkPolicy.choose(100, cost) == ChunkPolicy(100)
    assert ChunkPolicy.choose(None, cost) == ChunkPolicy(512)
    sizes = (256, 512, 640)
    assert ChunkPolicy.choose(None, cost, sizes) == ChunkPolicy(512, sizes)
    others = (96, 256, 512, 576, 640)  # that products compute with a remainder
    assert ChunkPolicy.choose(None, cost, others) == ChunkPolicy(512, sizes)
    assert ChunkPolicy.choose(100, cost, sizes) == ChunkPolicy(100), "exactly what was asked for"


@pytest.mark.parametrize(
    ("num_decodes", "num_prompt_tokens"),
    [(1, 511), (8, 504), (63, 449), (65, 575), (128, 512), (129, 511), (384, 256), (385, 512)],
)
def test_a_chunk_and_its_decodes_fill_a_captured_size(
    num_decodes: int, num_prompt_tokens: int
) -> None:
    """The nearest one, as long as that leaves room for a chunk worth its step."""
    policy = ChunkPolicy(512, (16, 256, 512, 640))
    assert policy.budget(num_decodes, 0, []).num_tokens == num_prompt_tokens
    assert ChunkPolicy.choose(None, None) == UNBOUNDED


def test_few_captured_sizes_leave_prompts_their_share() -> None:
    """The nearest may have room for the decodes alone, or not for them: a token at a time."""
    policy = ChunkPolicy(512, (256, 512, 2048))
    assert policy.budget(300, 0, []).num_tokens == 2048 - 300
    assert policy.budget(500, 0, []).num_tokens == 2048 - 500
    assert policy.budget(200, 0, []).num_tokens == 512 - 200


@pytest.mark.parametrize(
    ("length", "chunks"),
    [(1024, [505, 519]), (1026, [505, 521]), (1027, [505, 505, 17]), (521, [521]), (500, [500])],
)
def test_a_prompt_leaves_no_crumb_because_of_decodes(length: int, chunks: list[int]) -> None:
    """Seven decodes and 521 tokens are 528, a 32nd more than the chunk."""
    options = {"max_num_batched_tokens": 4096, "num_pages": 1000, "max_num_seqs": 16}
    scheduler = make_scheduler(chunk_policy=ChunkPolicy(512, (256, 512, 640)), **options)
    for number in range(1, 8):
        add(scheduler, make_request(number, [number], max_tokens=1000))
    run_step(scheduler)
    add(scheduler, make_request(8, range(1000, 1000 + length)))
    plans = [run_step(scheduler) for _ in chunks]
    assert [plan.num_tokens - 7 for plan in plans] == chunks
    assert plans[-1].prefills[0].samples


def test_only_a_steps_first_prompt_goes_beyond_the_chunk() -> None:
    policy = ChunkPolicy(512, (256, 512, 640))
    scheduler = with_a_decode(policy, max_num_batched_tokens=4096, num_pages=1000)
    add(scheduler, make_request(2, range(1000, 1300)))
    add(scheduler, make_request(3, range(2000, 2213)))
    add(scheduler, make_request(4, range(3000, 3300)))
    assert prefilling(run_step(scheduler)) == [("r2", 0, 300), ("r3", 0, 211)]


def test_a_prompt_that_is_passed_keeps_its_half_of_an_idle_devices_step() -> None:
    """Those that pass it share a chunk, which the first of them may be longer than."""
    scheduler = make_scheduler(chunk_policy=ChunkPolicy(8), max_num_batched_tokens=60)
    add(scheduler, make_request(1, range(200)))
    run_step(scheduler)
    add(scheduler, make_request(2, range(300, 325)))
    add(scheduler, make_request(3, range(400, 402)))
    assert prefilling(run_step(scheduler)) == [("r2", 0, 25), ("r1", 60, 30)]


def test_no_prompt_goes_beyond_what_a_step_may_have() -> None:
    policy = ChunkPolicy(512, (256, 512, 640))
    scheduler = with_a_decode(policy, max_num_batched_tokens=515, num_pages=1000)
    add(scheduler, make_request(2, range(1000, 1515)))
    assert prefilling(run_step(scheduler)) == [("r2", 0, 511)]
    assert prefilling(run_step(scheduler)) == [("r2", 511, 4)]


@pytest.mark.parametrize(("num_decodes", "to_end"), [(7, 16), (63, 16), (65, 0), (250, 0)])
def test_more_to_end_a_prompt_fills_the_size_above_a_chunk(num_decodes: int, to_end: int) -> None:
    """Not beside decodes for whom the step is larger anyway; not if the user set the chunk."""
    assert ChunkPolicy(512, (256, 512, 640, 768)).budget(num_decodes, 0, []).to_end == to_end
    assert ChunkPolicy(512).budget(num_decodes, 0, []).to_end == 0
    budget = ChunkPolicy(512, (256, 512)).budget(num_decodes, 0, [])
    assert budget.to_end == 0, "nor where no size above it is captured"


@pytest.mark.parametrize(
    ("num_startable", "begun", "num_tokens"),
    [
        (4096, [], 512),  # a prompt's own tokens are not known before it is admitted
        (4096, [300], 512),
        (3000, [1000], 512),
        (4096 - 513, [513], 768),
        (0, [7000], 768),
    ],
)
def test_steps_are_longer_while_a_long_prompt_has_begun_and_much_waits(
    num_startable: int, begun: list[int], num_tokens: int
) -> None:
    policy = ChunkPolicy(512, (256, 512, 640, 768, 1024))
    assert policy.budget(8, num_startable, begun).num_tokens == num_tokens - 8
    assert policy.budget(200, num_startable, begun).num_tokens == 768 - 200, "as long as ever"
    assert ChunkPolicy(512).budget(8, num_startable, begun).num_tokens == 512
    few = ChunkPolicy(512, (256, 512))
    assert few.budget(8, num_startable, begun).num_tokens == 504, "never more than is captured"


# --- one step ahead ------------------------------------------------------------------------------


def test_a_decode_is_planned_before_its_input_token_is_known() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, make_request(1, range(4), max_tokens=3))
    first, second, third = scheduler.plan(), scheduler.plan(), scheduler.plan()
    assert third is not None and third.decodes.positions[0] == 5
    assert seq.num_in_flight == 3 and seq.num_output_tokens == 0
    assert scheduler.plan() is None, "max_tokens is known ahead: no row is wasted on it"
    for plan in (first, second, third):
        assert seq.status is SequenceStatus.RUNNING
        finish(scheduler, plan)
    assert seq.finish_reason == "length"
    scheduler.check_empty()


def test_a_request_that_needs_its_tokens_is_in_every_step_and_says_so() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, make_request(1, range(4), bad_words_ids=((1, 2),)))
    add(scheduler, make_request(2, range(4), bad_words_ids=((1,), (2,))))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None and first.needs_host
    assert second is not None and second.needs_host
    assert decoding(second) == ["r1", "r2"]
    finish(scheduler, first)
    third = scheduler.plan()
    assert decoding(third) == ["r1", "r2"]
    scheduler.finish(seq, "abort")
    fourth = scheduler.plan()
    assert fourth is not None and not fourth.needs_host


def test_a_jump_is_a_prefill_of_the_next_plan_and_drops_the_sample_in_flight() -> None:
    scheduler = make_scheduler(block_size=4)
    seq = add(scheduler, make_request(1, range(4), max_tokens=9, stop_token_ids=[9]))
    before, ahead = scheduler.plan(), scheduler.plan()
    finish(scheduler, before, 5)
    updates = scheduler.jump_forward(seq, [6, 7, 8])
    assert [token_id for _, token_id, _ in updates] == [6, 7, 8]
    scheduler.check_integrity()
    after = scheduler.plan()
    assert prefilling(after) == [("r1", 5, 3)] and decoding(after) == []
    assert after is not None and after.prefills[0].token_ids == [6, 7, 8]
    assert finish(scheduler, ahead, 6) == [], "the sample that the first of them stood for"
    assert decoding(scheduler.plan()) == ["r1"], "one ahead of it, as ever"
    assert [token_id for _, token_id, _ in finish(scheduler, after, 1)] == [1]
    assert seq.token_ids[4:] == [5, 6, 7, 8, 1]


@pytest.mark.parametrize(
    ("tokens", "said", "reason"),
    [([6, 9, 7], [5, 6, 9], "stop"), ([6, 7, 8, 4], [5, 6, 7, 8], "length")],
)
def test_a_jump_ends_where_its_sequence_does(
    tokens: list[int], said: list[int], reason: FinishReason
) -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, make_request(1, range(4), max_tokens=4, stop_token_ids=[9]))
    before, ahead = scheduler.plan(), scheduler.plan()
    finish(scheduler, before, 5)
    scheduler.jump_forward(seq, tokens)
    assert seq.token_ids[4:] == said and seq.finish_reason is reason
    scheduler.check_empty()
    assert finish(scheduler, ahead) == []


def test_a_jump_beside_a_long_prompt_does_not_wait_for_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, make_request(1, range(40), max_tokens=1))
    scheduler.plan()
    seq = add(scheduler, make_request(2, [1, 2, 3], max_tokens=9))
    plan = scheduler.plan()
    assert plan is not None and plan.sampled == (seq,)
    scheduler.jump_forward(seq, [6, 7, 8])
    assert prefilling(scheduler.plan()) == [("r2", 3, 3), ("r1", 17, 7)]


def test_who_jumps_waits_for_no_more_of_a_prompt_than_who_decodes() -> None:
    """And its tokens are part of what fills a captured size."""
    policy = ChunkPolicy(512, (256, 512, 640))
    scheduler = make_scheduler(num_pages=2000, max_num_batched_tokens=4096, chunk_policy=policy)
    seq = add(scheduler, make_request(1, [1, 2, 3], max_tokens=100))
    scheduler.plan()
    scheduler.jump_forward(seq, [6, 7, 8])
    add(scheduler, make_request(2, range(1000, 5000)))
    plan = scheduler.plan()
    assert prefilling(plan) == [("r1", 3, 3), ("r2", 0, 509)]


def test_a_jump_of_a_penalised_sequence_tells_the_device_all_it_has_said() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, make_request(1, range(3), presence_penalty=1.0))
    scheduler.plan()
    scheduler.jump_forward(seq, [6, 7])
    after = scheduler.plan()
    assert after is not None and not after.page_appends
    (init,) = after.slot_inits
    assert init.token_ids == [0, 1, 2, 6, 7] and init.slot == seq.slot
    assert init.block_ids == [pages_of(scheduler.blocks, seq)] and len(init.block_ids[0]) == 2


def test_the_row_of_a_sequence_that_stopped_is_dropped() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    seq = add(scheduler, make_request(1, range(4), stop_token_ids=[9]))
    before, ahead = scheduler.plan(), scheduler.plan()
    finish(scheduler, before, token_id=9)
    assert seq.status is SequenceStatus.FINISHED and seq.token_ids[4:] == [9]
    scheduler.check_empty()

    add(scheduler, make_request(2, range(10, 14)))
    after = scheduler.plan()
    assert prefilling(after) == [("r2", 0, 4)], "slot and pages are free at once"
    assert finish(scheduler, ahead) == []
    assert seq.token_ids[4:] == [9]
    assert len(finish(scheduler, after)) == 1


@pytest.mark.parametrize("aborted", [False, True])
def test_a_prompt_in_flight_is_found_by_the_next_plan_but_not_by_its_own(aborted: bool) -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(1, range(9)))
    twin = add(scheduler, make_request(2, range(9)))
    in_flight = scheduler.plan()
    assert prefilling(in_flight) == [("r1", 0, 9), ("r2", 0, 9)] and twin.num_cached_tokens == 0
    if aborted:  # the step runs all the same, before any that reads what it wrote
        scheduler.abort("r1")
        scheduler.abort("r2")
    seq = add(scheduler, make_request(3, range(9)))
    ahead = scheduler.plan()
    assert prefilling(ahead) == [("r3", 8, 1)] and seq.num_cached_tokens == 8
    finish(scheduler, in_flight)
    finish(scheduler, ahead)


def test_what_a_decode_in_flight_samples_is_not_published_after_an_abort() -> None:
    """It is known only when the step is finished; then its pages may be another's."""
    scheduler = make_scheduler()
    add(scheduler, make_request(1, range(6)))
    run_step(scheduler)
    in_flight = scheduler.plan()
    assert decoding(in_flight) == ["r1"]
    scheduler.abort("r1")
    finish(scheduler, in_flight)
    seq = add(scheduler, make_request(2, [*range(6), 7, 7, 7]))
    scheduler.plan()
    assert seq.num_cached_tokens == 4


def test_a_step_of_the_same_decodes_looks_only_at_rows_that_begin_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host's cost of a step does not grow with a function call per row."""
    scheduler = make_scheduler(num_pages=1000, max_num_seqs=20, max_num_batched_tokens=1000)
    for number in range(20):
        add(scheduler, make_request(number, range(100 * number, 100 * number + 4 + number % 4)))
    run_step(scheduler)
    before = run_step(scheduler).decodes
    asked: list[int] = []
    extend = scheduler.blocks.extend

    def count(seqs: list[Sequence]) -> list[PageAppend]:
        asked.extend(seq.num_computed for seq in seqs)
        return extend(seqs)

    monkeypatch.setattr(scheduler.blocks, "extend", count)
    for num_steps in range(1, 5):
        batch = run_step(scheduler).decodes
        assert batch.seqs is before.seqs and batch.slots is before.slots
        assert (batch.positions == before.positions + num_steps).all()
    assert len(asked) == 20 and all(position % 4 == 0 for position in asked)

    scheduler.abort("r3")
    after = run_step(scheduler).decodes
    assert len(after) == 19 and after.slots is not before.slots
    with pytest.raises(ValueError, match="read-only"):
        after.slots[0] = 1


# --- the end of a sequence -----------------------------------------------------------------------


def test_stop_tokens() -> None:
    scheduler = make_scheduler()
    eos = add(scheduler, make_request(1, [1], eos_token_ids=[9]))
    asked = add(scheduler, make_request(2, [2], stop_token_ids=[9]))
    run_step(scheduler, token_id=8)
    run_step(scheduler, token_id=9)
    assert (eos.finish_reason, eos.stop_reason) == ("stop", None)
    assert (asked.finish_reason, asked.stop_reason) == ("stop", 9)
    scheduler.check_empty()


def test_no_stop_before_min_tokens() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, make_request(1, [1], stop_token_ids=[9], min_tokens=3))
    for _ in range(3):
        assert seq.status is not SequenceStatus.FINISHED
        run_step(scheduler, token_id=9)
    assert seq.finish_reason == "stop" and seq.num_output_tokens == 3


def test_logprobs_reach_their_sequence() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(1, [1], logprobs=1))
    add(scheduler, make_request(2, [2]))
    plan = scheduler.plan()
    assert plan is not None
    logprobs = TokenLogprobs(-0.5, 1, [7], [-0.5])
    updates = scheduler.finish_step(plan, StepResult([7, 8], [logprobs, None]))
    assert [tuple(rest) for _, *rest in updates] == [(7, logprobs), (8, None)]


def test_whoever_reads_the_text_may_end_a_sequence() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, make_request(1, range(4)))
    run_step(scheduler)
    scheduler.finish(seq, "stop", "the end")
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "the end")
    scheduler.check_empty()
    with pytest.raises(AssertionError, match="ended twice"):
        scheduler.finish(seq, "stop")


# --- order ---------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for number, priority in ((1, 0), (2, 5), (3, -5)):
        add(scheduler, make_request(number, [number], max_tokens=1, priority=priority))
    order = [prefilling(run_step(scheduler))[0][0] for _ in range(3)]
    assert order == ["r1", "r2", "r3"]


def test_lower_priority_numbers_come_first_then_age() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for number, priority in ((1, 0), (2, 5), (3, -5), (4, -5)):
        add(scheduler, make_request(number, [number], max_tokens=1, priority=priority))
    order = [prefilling(run_step(scheduler))[0][0] for _ in range(4)]
    assert order == ["r3", "r4", "r1", "r2"]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    scheduler = make_scheduler(num_pages=4, block_size=4)
    add(scheduler, make_request(1, range(8), max_tokens=2))
    run_step(scheduler)
    add(scheduler, make_request(2, range(10, 26), max_tokens=1))  # needs all four pages
    add(scheduler, make_request(3, [3], max_tokens=1))  # would fit
    assert prefilling(run_step(scheduler)) == []
    assert prefilling(run_step(scheduler)) == [("r2", 0, 16)]
    assert prefilling(run_step(scheduler)) == [("r3", 0, 1)]


def test_admission_leaves_some_pages_for_decodes() -> None:
    scheduler = make_scheduler(num_pages=200, block_size=1, max_num_batched_tokens=1000)
    add(scheduler, make_request(1, range(100)))
    run_step(scheduler)
    too_large = add(scheduler, make_request(2, range(1000, 1098)))
    run_step(scheduler)
    assert too_large.status is SequenceStatus.WAITING
    scheduler.abort("r2")
    fits = add(scheduler, make_request(3, range(1000, 1096)))
    run_step(scheduler)
    assert fits.status is SequenceStatus.RUNNING


def test_a_lone_sequence_may_take_the_last_page() -> None:
    scheduler = make_scheduler(num_pages=200, block_size=1, max_num_batched_tokens=1000)
    seq = add(scheduler, make_request(1, range(200), max_tokens=1))
    run_step(scheduler)
    assert seq.finish_reason == "length"


# --- preemption ----------------------------------------------------------------------------------


def two_that_cannot_both_grow(**options: Any) -> tuple[Scheduler, Sequence, Sequence]:
    """Four pages of 4: both have a full page and a last one that is full after the next step."""
    scheduler = make_scheduler(num_pages=4, block_size=4, **options)
    older = add(scheduler, make_request(1, range(7), max_tokens=9))
    younger = add(scheduler, make_request(2, range(10, 17), max_tokens=9))
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.blocks.device.num_free == 0
    return scheduler, older, younger


def test_the_youngest_is_recomputed_where_pages_are_short() -> None:
    scheduler, older, younger = two_that_cannot_both_grow(preemption_mode="recompute")
    plan = run_step(scheduler)
    assert decoding(plan) == ["r1"] and not plan.swap_out
    assert younger.status is SequenceStatus.WAITING and younger.num_computed == 0
    assert younger.num_output_tokens == 2, "it keeps its tokens"
    assert younger.request.metrics.num_preemptions == 1
    assert scheduler.stats().num_preemptions_recompute == 1

    scheduler.finish(older, "stop")
    plan = run_step(scheduler)
    assert prefilling(plan) == [("r2", 4, 5)], "its first block was still cached"
    assert plan.prefills[0].token_ids == younger.token_ids[4:9]


def test_the_youngest_is_swapped_where_pages_are_short() -> None:
    scheduler, older, younger = two_that_cannot_both_grow(preemption_mode="swap", num_host_pages=2)
    pages = pages_of(scheduler.blocks, younger)
    plan = run_step(scheduler)
    assert decoding(plan) == ["r1"] and [page for page, _ in plan.swap_out] == pages
    assert younger.status is SequenceStatus.SWAPPED and younger.num_computed == 8
    assert scheduler.stats().num_preemptions_swap == 1
    assert scheduler.stats().num_swapped == 1 and scheduler.stats().num_waiting == 0

    scheduler.finish(older, "stop")
    plan = run_step(scheduler)
    assert decoding(plan) == ["r2"] and plan.decodes.positions[0] == 8
    assert plan.slot_inits[0].token_ids[-1] == younger.token_ids[8]
    assert scheduler.blocks.host.num_used == 0


def test_without_host_pages_a_swap_becomes_a_recomputation() -> None:
    scheduler, _, younger = two_that_cannot_both_grow(preemption_mode="swap", num_host_pages=1)
    run_step(scheduler)
    assert younger.status is SequenceStatus.WAITING


@pytest.mark.parametrize(
    ("seconds_per_page", "status"),
    [(1.0, SequenceStatus.SWAPPED), (4.0, SequenceStatus.WAITING)],
)
def test_auto_takes_what_is_cheaper(seconds_per_page: float, status: SequenceStatus) -> None:
    # Two pages there and back cost 4 times seconds_per_page; eight tokens and one cost 9.
    scheduler, _, younger = two_that_cannot_both_grow(
        num_host_pages=2,
        enable_prefix_caching=False,
        swap_cost=SwapCost(seconds_per_page, seconds_per_token=1.0),
    )
    run_step(scheduler)
    assert younger.status is status


def test_who_is_preempted_keeps_its_place_in_the_queue() -> None:
    scheduler, older, _ = two_that_cannot_both_grow(preemption_mode="recompute")
    add(scheduler, make_request(3, [3]))
    run_step(scheduler)
    assert [seq.request.request_id for seq in scheduler.waiting] == ["r2", "r3"]
    scheduler.finish(older, "stop")
    assert [name for name, _, _ in prefilling(run_step(scheduler))] == ["r2", "r3"]


def test_a_step_that_preempts_admits_nobody() -> None:
    scheduler, _, _ = two_that_cannot_both_grow(preemption_mode="recompute")
    small = add(scheduler, make_request(0, [3], max_tokens=1))  # older than the others, and fits
    plan = run_step(scheduler)
    assert not plan.prefills and small.status is SequenceStatus.WAITING
    assert prefilling(run_step(scheduler))[0] == ("r0", 0, 1)


def test_a_token_in_flight_survives_the_preemption() -> None:
    scheduler = make_scheduler(num_pages=4, block_size=4, preemption_mode="recompute")
    older = add(scheduler, make_request(1, range(7), max_tokens=9))
    younger = add(scheduler, make_request(2, range(10, 17), max_tokens=9))
    run_step(scheduler)
    in_flight = scheduler.plan()
    assert decoding(in_flight) == ["r1", "r2"]
    ahead = scheduler.plan()
    assert decoding(ahead) == ["r1"] and younger.num_in_flight == 1
    finish(scheduler, in_flight, token_id=5)
    assert younger.token_ids[-1] == 5 and younger.num_in_flight == 0
    scheduler.finish(older, "stop")
    back = scheduler.plan()
    assert back is not None and back.prefills[0].token_ids[-1] == 5
    assert back.prefills[0].seq is younger
    finish(scheduler, ahead)


def test_a_preempted_sequence_may_end_by_the_token_in_flight() -> None:
    scheduler = make_scheduler(num_pages=4, block_size=4, preemption_mode="recompute")
    add(scheduler, make_request(1, range(7), max_tokens=9))
    younger = add(scheduler, make_request(2, range(10, 17), max_tokens=9, stop_token_ids=[5]))
    run_step(scheduler)
    in_flight = scheduler.plan()
    scheduler.plan()
    assert younger.status is SequenceStatus.WAITING
    finish(scheduler, in_flight, token_id=5)
    assert younger.finish_reason == "stop" and not scheduler.waiting


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """A prefill that is preempted finds its own blocks again: that is no hit of the request."""
    scheduler = make_scheduler(
        num_pages=6, block_size=4, max_num_batched_tokens=9, preemption_mode="recompute"
    )
    older = add(scheduler, make_request(1, range(7), max_tokens=12))
    run_step(scheduler)
    younger = add(scheduler, make_request(2, range(10, 26), max_tokens=2))
    run_step(scheduler)  # a chunk of two blocks, which are published
    run_step(scheduler)
    assert younger.status is SequenceStatus.WAITING and younger.num_output_tokens == 0
    queries = scheduler.stats().prefix_cache_queries
    scheduler.finish(older, "stop")
    assert prefilling(run_step(scheduler)) == [("r2", 8, 8)]
    assert younger.num_cached_tokens == 0
    assert scheduler.stats().prefix_cache_queries == queries


# --- forks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended_by", ["its length", "its client", "preemption"])
def test_what_an_answer_has_filled_is_found_after_it(ended_by: str) -> None:
    scheduler = make_scheduler(num_pages=50, preemption_mode="recompute")
    seq = add(scheduler, make_request(1, range(6), max_tokens=9))
    for _ in range(9 if ended_by == "its length" else 8):
        run_step(scheduler)
    if ended_by == "its client":
        scheduler.abort("r1")
    elif ended_by == "preemption":
        scheduler._preemption.preempt(seq, scheduler.running, StepDraft())
    said = [*range(6), *[7] * 9]
    again = add(scheduler, make_request(2, said, priority=-1))
    run_step(scheduler)
    known = 14 if ended_by == "its length" else 13  # of the last token there are no keys
    assert again.num_cached_tokens == known // 4 * 4


def test_an_answer_in_progress_is_found_some_blocks_later() -> None:
    scheduler = make_scheduler(num_pages=200)
    seq = add(scheduler, make_request(1, [1, 2], max_tokens=200))
    while seq.num_computed < PUBLISHED_BLOCKS * 4 - 1:
        run_step(scheduler)
    asked = [1, 2, *[7] * PUBLISHED_BLOCKS * 4]
    assert not scheduler.blocks.prefixes.match(make_request(2, asked).sequences[0])
    run_step(scheduler)
    found = scheduler.blocks.prefixes.match(make_request(3, asked).sequences[0])
    assert found == PUBLISHED_BLOCKS


def test_siblings_share_the_prompt_and_copy_its_last_page() -> None:
    scheduler = make_scheduler()
    request = make_request(1, range(6), n=3)
    scheduler.add(request)
    plan = run_step(scheduler)
    assert plan.sampled == tuple(request.sequences) and len(plan.prefills) == 1
    assert [init.slot for init in plan.slot_inits] == [1, 2, 3]
    assert [init.num_computed for init in plan.slot_inits] == [0, 6, 6]
    assert scheduler.blocks.device.num_used == 2
    plan = run_step(scheduler)
    assert len(plan.decodes) == 3 and len(plan.page_copies) == 2, "the last one writes in place"
    assert len({source for source, _ in plan.page_copies}) == 1
    assert scheduler.blocks.device.num_used == 4
    scheduler.abort("r1")
    scheduler.check_empty()


def test_siblings_without_a_slot_queue_on_their_own_and_find_the_prompt() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    request = make_request(1, range(6), n=4, max_tokens=2)
    scheduler.add(request)
    first, second, third, fourth = request.sequences
    plan = run_step(scheduler)
    assert plan.sampled == (first, second) and list(scheduler.waiting) == [third, fourth]
    run_step(scheduler)
    assert first.status is second.status is SequenceStatus.FINISHED
    plan = run_step(scheduler)
    assert prefilling(plan) == [("r1", 4, 2), ("r1", 4, 2)]
    assert plan.sampled == (third, fourth) and third.num_cached_tokens == 4
    run_step(scheduler)
    scheduler.check_empty()


def test_a_sibling_may_end_before_the_fork() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make_request(1, range(6), n=3)
    scheduler.add(request)
    run_step(scheduler)
    scheduler.finish(request.sequences[1], "error")
    scheduler.check_integrity()
    assert run_step(scheduler).sampled == (request.sequences[0], request.sequences[2])


def test_prompt_logprobs_compute_every_position() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(1, range(10), max_tokens=1))
    run_step(scheduler)
    add(scheduler, make_request(2, range(10)))
    seq = add(scheduler, make_request(3, range(10), prompt_logprobs=0))
    assert prefilling(scheduler.plan()) == [("r2", 8, 2), ("r3", 0, 10)]
    assert seq.num_cached_tokens == 0


# --- aborts --------------------------------------------------------------------------------------


def test_an_abort_in_every_state_leaves_nothing() -> None:
    scheduler, _, younger = two_that_cannot_both_grow(preemption_mode="swap", num_host_pages=2)
    run_step(scheduler)
    assert younger.status is SequenceStatus.SWAPPED
    add(scheduler, make_request(3, range(5), n=2))
    assert scheduler.num_requests == 3
    assert list(scheduled_requests(scheduler)) == ["r1", "r2", "r3"]
    for request_id in ("r2", "r3", "r1"):  # swapped; waiting and not forked; running
        request = scheduler.abort(request_id)
        assert request is not None and request.finished
        assert {seq.finish_reason for seq in request.sequences} == {"abort"}
        assert request_id not in scheduled_requests(scheduler)
        scheduler.check_integrity()
    scheduler.check_empty()


def test_an_abort_of_an_unknown_request_is_nothing() -> None:
    assert make_scheduler().abort("nobody") is None


def test_a_request_id_is_free_again_after_its_end() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(1, range(4)))
    with pytest.raises(AssertionError, match="request r1 twice"):
        scheduler.add(make_request(1, range(4)))
    in_flight = scheduler.plan()
    scheduler.abort("r1")
    again = add(scheduler, make_request(1, range(4)))
    assert finish(scheduler, in_flight) == [] and again.num_output_tokens == 0
    run_step(scheduler)
    assert again.num_output_tokens == 1


# --- books ---------------------------------------------------------------------------------------


def test_stats() -> None:
    scheduler = make_scheduler(num_pages=10, block_size=4, num_host_pages=3, max_num_seqs=1)
    add(scheduler, make_request(1, range(9), max_tokens=1))
    run_step(scheduler)
    add(scheduler, make_request(2, range(9)))
    add(scheduler, make_request(3, range(9)))
    run_step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (1, 1, 0)
    assert (stats.num_pages, stats.num_used_pages, stats.num_host_pages) == (10, 3, 3)
    assert stats.kv_cache_usage == 0.3
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 8)


def test_check_integrity_sees_a_lost_sequence_and_a_doubled_slot() -> None:
    scheduler = make_scheduler()
    lost = add(scheduler, make_request(1, range(4)))
    scheduler.waiting.remove(lost)
    with pytest.raises(AssertionError, match="lost or doubled"):
        scheduler.check_integrity()
    scheduler.waiting.add(lost)
    doubled = add(scheduler, make_request(2, range(4)))
    run_step(scheduler)
    doubled.slot = lost.slot
    with pytest.raises(AssertionError, match="a slot is held twice"):
        scheduler.check_integrity()


def test_the_scheduler_needs_no_torch() -> None:
    """Follow what the scheduler and the pipeline import, to the end."""
    root = Path(asyncllm.types.__file__).parents[1]
    todo, seen = ["asyncllm.engine.scheduler", "asyncllm.engine.pipeline"], set()
    while todo:
        module = todo.pop()
        seen.add(module)
        file = root / (module.replace(".", "/") + ".py")
        if module.startswith("asyncllm.") and file.exists():
            body = ast.parse(file.read_text()).body
            found = [node.module for node in body if isinstance(node, ast.ImportFrom)]
            found += [a.name for node in body if isinstance(node, ast.Import) for a in node.names]
            todo += [name for name in found if name is not None and name not in seen]
    assert "asyncllm.engine.page_pool" in seen
    heavy = {"torch", "transformers"} & {name.split(".")[0] for name in seen}
    assert not heavy, f"imported on the way: {sorted(heavy)}"
