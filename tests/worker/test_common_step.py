"""The step that several engines do at the same time: its shape, and the padding of each."""

from __future__ import annotations

import random

import numpy as np
import pytest

from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.step_plan import CommonStep, StepKind, StepNeed, StepShape
from asyncllm.types import PADDING_PAGE, PADDING_SLOT
from asyncllm.worker.common_step import common_step, padded
from asyncllm.worker.packed_step import NO_ROWS, PackedStep, padding_prompt
from asyncllm.worker.step_packer import StepPacker
from tests.engine.builders import make_request, make_scheduler, run_step

BLOCK_SIZE, VOCAB_SIZE, MAX_PROMPT_TOKENS = 4, 50, 9
DECODE, MIXED, PREFILL = StepKind.DECODE, StepKind.MIXED, StepKind.PREFILL
NOTHING = StepNeed()


def graphs(decode: tuple[int, ...] = (), mixed: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
    captured: dict[StepKind, SizedGraphs[None]] = {kind: SizedGraphs() for kind in StepKind}
    for kind, sizes in ((DECODE, decode), (MIXED, mixed), (PREFILL, mixed)):
        for size in sizes:
            captured[kind].add(size, None)
    return lambda shape: captured[shape.kind].fitting(shape.size)


@pytest.mark.parametrize(
    ("needs", "shape", "in_graph"),
    [
        ([StepNeed(3), NOTHING], (DECODE, 4, False), True),
        ([StepNeed(3), StepNeed(9)], (DECODE, 9, False), False),
        ([StepNeed(3), StepNeed(1, adapters=True)], (DECODE, 4, True), True),
        ([NOTHING, StepNeed(0, 5)], (PREFILL, 16, False), True),
        ([StepNeed(2), StepNeed(0, 5)], (MIXED, 16, False), True),
        ([StepNeed(16), StepNeed(0, 5)], (MIXED, 17, False), False),  # and a token of padding
        ([StepNeed(1, 40), StepNeed(2)], (MIXED, 41, False), False),
        ([StepNeed(1, 4), StepNeed(2, fits_graph=False)], (MIXED, 5, False), False),
        ([StepNeed(1), StepNeed(2, fits_graph=False)], (DECODE, 2, False), True),
    ],
)
def test_the_least_step_that_holds_all(
    needs: list[StepNeed], shape: tuple[StepKind, int, bool], in_graph: bool
) -> None:
    found = common_step(needs, graphs(decode=(2, 4), mixed=(4, 16)))
    assert found == CommonStep(StepShape(*shape), in_graph)


def padding(num_tokens: int) -> PackedStep:
    return padding_prompt(num_tokens, BLOCK_SIZE, 1, VOCAB_SIZE)


def packed_steps(seed: int) -> list[PackedStep]:
    """Steps of an engine in use: decodes, prompts and both."""
    rng = random.Random(seed)
    scheduler, packer = make_scheduler(block_size=BLOCK_SIZE, max_num_seqs=8), StepPacker(9, 4)
    steps = []
    for number in range(12):
        if rng.random() < 0.4:
            scheduler.add(make_request(number, range(rng.randint(1, 9)), max_tokens=5))
        if scheduler.num_requests:
            steps.append(packer.pack(run_step(scheduler)))
    return steps


def test_padding_changes_nothing_of_an_engines_own_rows() -> None:
    rng, seen = random.Random(1), set()
    for seed in range(20):
        for step in packed_steps(seed):
            own = step.shape
            others = StepNeed(rng.randint(0, 6), rng.choice([0, 0, 7, 30]))
            need = StepNeed(len(step.decode_slots), step.prefills.num_tokens)
            common = common_step([need, others], graphs(*rng.choice([(), ((8,), (16, 64))])))
            made = padded(step, common, padding, MAX_PROMPT_TOKENS)
            check(made, step, common)
            seen.add((own.kind, common.shape.kind, common.in_graph))
    assert {(DECODE, DECODE, False), (DECODE, MIXED, False), (DECODE, MIXED, True),
            (PREFILL, MIXED, True), (MIXED, MIXED, False)} <= seen  # fmt: skip


def check(made: PackedStep, step: PackedStep, common: CommonStep) -> None:
    num_decodes, num_prompts = len(step.decode_slots), step.prefills.num_tokens
    assert made.common == common and made.num_padding == made.shape.size - step.shape.size
    assert made.has_prompts == (common.shape.kind is not DECODE)
    if common.in_graph:
        assert step.shape.size <= made.shape.size <= common.shape.size
        assert made.num_padding <= 1
    else:
        assert made.shape.size == common.shape.size
    assert np.array_equal(made.decode_slots[:num_decodes], step.decode_slots)
    assert np.array_equal(made.decode_positions[:num_decodes], step.decode_positions)
    assert (made.decode_slots[num_decodes:] == PADDING_SLOT).all()
    assert np.array_equal(made.sampled_slots, step.sampled_slots)
    if not made.has_prompts:
        return
    assert len(made.decode_slots) == num_decodes  # a padding row has no place among them there
    assert made.tokens.shape[1] == made.prefills.num_tokens
    if step.has_prompts:
        assert np.array_equal(made.tokens[:, :num_prompts], step.tokens)
        assert np.array_equal(made.samples, step.samples)
    else:
        positions = step.decode_positions + 1
        expected = np.stack((np.arange(num_decodes), step.decode_slots, positions))
        assert np.array_equal(made.samples, expected) and made.samples.dtype == np.int32
    _, positions, slots, write_slots = made.tokens[:, num_prompts:]
    assert (slots == PADDING_SLOT).all() and (write_slots < BLOCK_SIZE).all()
    assert (positions < MAX_PROMPT_TOKENS).all()
    rows, own_rows = made.prefills, len(step.prefills.kv_lens)
    assert np.array_equal(rows.kv_lens[:own_rows], step.prefills.kv_lens)
    num_pages = step.prefills.page_indptr[-1]
    assert np.array_equal(rows.pages[:, :num_pages], step.prefills.pages)
    assert (rows.pages[:, num_pages:] == PADDING_PAGE).all()
    assert (rows.slots[own_rows:] == PADDING_SLOT).all()
    assert len(rows.query_indptr) == len(rows.page_indptr) == len(rows.kv_lens) + 1
    assert (np.diff(rows.page_indptr) * BLOCK_SIZE >= rows.kv_lens).all()
    assert made.tokens.dtype == rows.pages.dtype == rows.query_indptr.dtype == np.int32


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("kind", [DECODE, PREFILL, MIXED])
def test_an_engine_without_work(kind: StepKind, in_graph: bool) -> None:
    """It has one token of padding at least, and samples nothing."""
    nothing = PackedStep(NO_ROWS, NO_ROWS, NO_ROWS)
    common = CommonStep(StepShape(kind, 6, adapters=True), in_graph)
    made = padded(nothing, common, padding, MAX_PROMPT_TOKENS)
    assert made.adapters and made.num_padding == (1 if in_graph else 6)
    assert made.shape.kind is (DECODE if kind is DECODE else PREFILL)
    check(made, nothing, common)
    assert not len(made.sampled_slots)
