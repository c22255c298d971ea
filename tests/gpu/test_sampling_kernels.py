"""The sampler's two kernels against torch; without a CUDA device in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import SamplingParams
from asyncllm.types import NON_FINITE_TOKEN
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.packed_step import NO_FEATURE
from asyncllm.worker.sampler import sample_fully, sample_slots_torch
from asyncllm.worker.slot_changes import LEAST_TOP_P
from asyncllm.worker.token_masks import NO_MASK, RowMasks
from tests.sampling.test_distributions import MAX_SCORE, SINGLES, expected, make_logits, score

triton = pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if ON_GPU:
    pytestmark = pytest.mark.gpu
else:
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("this Triton's interpreter knows no numpy 2.4", allow_module_level=True)

from asyncllm.kernels.sampling.kernel import BLOCK, sample_slots_triton  # noqa: E402

INF, NAN = float("inf"), float("nan")
BF16 = torch.bfloat16
NEAR_TIES = 0.02  # of the draws: logarithms differ in their last bits, which may turn a near tie
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "best": {"top_k": 1},
    "few": {"top_k": 7},
    "all": {"top_k": 10**6},
    "tiny": {"top_p": 1e-6},
    "nucleus": {"top_p": 0.9},
    "nearly all": {"top_p": 1 - 1e-7},
    "floor": {"min_p": 0.1},
    "as the best": {"min_p": 1.0},
    "usual": {"top_k": 20, "top_p": 0.95},
    "together": {"top_k": 30, "top_p": 0.8, "min_p": 0.02},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_state(params: list[SamplingParams], vocab: int) -> DeviceState:
    """Slot i + 1 with params i and a seed of its own."""
    state = DeviceState(len(params) + 1, 8, vocab, DEVICE)
    state.temperatures[1:] = torch.tensor([p.temperature for p in params])
    state.top_ks[1:] = torch.tensor([min(max(p.top_k, 0), 2**31 - 1) for p in params]).int()
    state.top_ps[1:] = torch.tensor([max(p.top_p, LEAST_TOP_P) for p in params])
    state.min_ps[1:] = torch.tensor([p.min_p for p in params])
    state.presence_penalties[1:] = torch.tensor([p.presence_penalty for p in params])
    state.frequency_penalties[1:] = torch.tensor([p.frequency_penalty for p in params])
    state.repetition_penalties[1:] = torch.tensor([p.repetition_penalty for p in params])
    state.seeds.copy_(torch.randint(-(2**62), 2**62, (len(params) + 1,)))
    state.positions[1:] = torch.randint(1, 9999, (len(params),)).int()
    return state


def hostile_rows(vocab: int) -> dict[str, torch.Tensor]:
    """f32 [vocab] each; of the last three no temperature makes a distribution."""
    usual = torch.randn(vocab) * 4
    few = torch.full((vocab,), -INF)
    few[[vocab // 2, vocab - 1, 0]] = torch.tensor([1.0, 0.5, -2.0])
    last = usual.clone()
    last[-1] = usual.max() + 1
    overflowing, spoilt, infinite = usual.clone(), usual.clone(), usual.clone()
    overflowing[7] = 3.3e38  # the largest that bfloat16 holds, nearly; divided by 0.8 infinite
    spoilt[vocab // 3], infinite[-1] = NAN, INF
    return {
        "usual": usual,
        "flat": torch.randn(vocab) / 8,
        "equal": torch.full((vocab,), 3.0),
        "ties": (usual / 3).round(),
        "few": few,
        "alone": torch.where(torch.arange(vocab) == vocab - 2, 0.0, -INF),
        "huge": usual * 1e30,
        "minute": usual * 1e-38,
        "negative": usual - 60,
        "zeros": torch.where(usual > 0, 0.0, -0.0),
        "last": last,
        "overflowing": overflowing,
        "spoilt": spoilt,
        "infinite": infinite,
        "nothing": torch.full((vocab,), -INF),
    }


def both(
    logits: torch.Tensor,
    params: list[SamplingParams],
    masks: RowMasks | None = None,
    in_slots: bool = True,
    tell: Callable[[DeviceState], None] = lambda state: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [rows] by the kernels and by torch, row i with params i; their states agree."""
    rows = len(params)
    states = [make_state(params, logits.shape[1])]
    states.append(make_state(params, logits.shape[1]))
    states[1].seeds.copy_(states[0].seeds)
    states[1].positions.copy_(states[0].positions)
    for state in states:
        tell(state)
    slots = torch.randperm(rows, device=DEVICE).int() + 1
    order = slots.long() - 1
    given = None if in_slots else torch.randint(1, 9999, (rows,), device=DEVICE).int()
    of_slots = logits.to(DEVICE)[order]
    tokens = [
        sample(state, of_slots, slots, given, masks)
        for sample, state in zip((sample_slots_triton, sample_slots_torch), states, strict=True)
    ]
    assert torch.equal(states[0].positions, states[1].positions)
    assert torch.equal(states[0].output_counts, states[1].output_counts)
    told = tokens[0] >= 0  # of what is not finite the state holds any token
    assert torch.equal(states[0].last_tokens[slots.long()][told], tokens[0][told])
    ours, reference = (torch.empty_like(each).index_copy_(0, order, each) for each in tokens)
    return ours, reference


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_hostile_logits(temperature: float) -> None:
    vocab = 4096 if ON_GPU else 500
    rows = hostile_rows(vocab)
    cases = [(name, filters) for name in rows for filters in FILTERS]
    params = [SamplingParams(temperature=temperature, **FILTERS[f]) for _, f in cases]
    logits = torch.stack([rows[name] for name, _ in cases]).to(BF16)
    ours, reference = both(logits, params)
    different = [
        (*case, a, b)
        for case, a, b in zip(cases, ours.tolist(), reference.tolist(), strict=True)
        if a != b
    ]
    assert len(different) <= (NEAR_TIES * len(cases) if temperature else 0), different
    hopeless = {"spoilt", "infinite", "nothing"} | ({"overflowing"} if temperature else set())
    bad = torch.tensor([name in hopeless for name, _ in cases])
    assert torch.equal(ours.cpu() == NON_FINITE_TOKEN, bad)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("middle", [16.0, -1.0])
@pytest.mark.parametrize("filters", [{"top_k": 6}, {"top_p": 0.55}], ids=["top_k", "top_p"])
def test_a_cutoff_falls_between_neighbouring_numbers(
    dtype: torch.dtype, middle: float, filters: dict[str, float]
) -> None:
    """Ten of them, nearly equally likely: a cutoff that is one of them off draws another token."""
    up = torch.tensor(middle, dtype=dtype)
    for _ in range(5):
        up = torch.nextafter(up, torch.tensor(INF, dtype=dtype))
    ladder = [up]
    while len(ladder) < 10:
        ladder.append(torch.nextafter(ladder[-1], torch.tensor(-INF, dtype=dtype)))
    logits = torch.full((97,), -100.0, dtype=dtype)
    places = torch.randperm(97)[:10]
    logits[places] = torch.stack(ladder)
    params = [SamplingParams(temperature=5.0, **filters)] * 40
    ours, reference = both(logits.expand(40, -1).contiguous(), params)
    assert torch.equal(ours, reference)
    assert len(set(ours.tolist())) == 6, "five or seven"


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [97, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("in_slots", [False, True])
def test_random_filters(dtype: torch.dtype, vocab: int, in_slots: bool) -> None:
    rng = np.random.default_rng(vocab)
    params = [
        SamplingParams(
            temperature=float(rng.uniform(0, 1.5)),
            top_k=int(rng.integers(0, 60)) * int(rng.integers(0, 2)),
            top_p=float(rng.choice([1.0, rng.uniform(0.02, 1)])),
            min_p=float(rng.choice([0.0, rng.uniform(0, 0.2)])),
        )
        for _ in range(256 if ON_GPU else 12)
    ]
    logits = (torch.randn(len(params), vocab) * 3).to(dtype)
    ours, reference = both(logits, params, in_slots=in_slots)
    assert (ours != reference).float().mean() <= NEAR_TIES


@pytest.mark.parametrize("vocab", [128256, 151936, 262145])
def test_large_vocabularies(vocab: int) -> None:
    names = ["usual", "together", "none", "few", "nucleus", "floor"][: 6 if ON_GPU else 2]
    params = [SamplingParams(temperature=0.6, **FILTERS[name]) for name in names]
    logits = (torch.randn(len(params), vocab) * 3).to(BF16)
    ours, reference = both(logits, params)
    assert torch.equal(ours, reference)


@pytest.mark.parametrize("vocab", [97, BLOCK + 1])
def test_masked_rows_are_filtered_among_what_their_masks_allow(vocab: int) -> None:
    params = [
        SamplingParams(temperature=t, **filters)
        for filters in (FILTERS["usual"], FILTERS["nucleus"], FILTERS["few"], {})
        for t in (0.0, 0.8, 2.0)
    ]
    rows = len(params)
    logits = torch.randn(rows, vocab) * 3
    logits[3, vocab - 1], logits[4, 0], logits[5] = NAN, INF, -INF
    of_row = torch.randperm(rows, device=DEVICE).int()
    of_row[:2] = NO_MASK
    bits = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device=DEVICE).int()
    bits[of_row[2].item()] = 0
    ours, reference = both(logits.to(BF16), params, RowMasks(of_row, bits))
    assert torch.equal(ours, reference)


PENALTIES: list[dict[str, float]] = [
    {},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("is_masked", [False, True])
def test_penalties(dtype: torch.dtype, is_masked: bool) -> None:
    """Penalties of what was said, and of what is in the prompt; the counts stay as they are."""
    vocab = 4097 if ON_GPU else 333
    cases = [
        SamplingParams(temperature=temperature, **filters, **penalties)
        for temperature in (0.0, 0.9)
        for filters in ({}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.5}, {"min_p": 0.05})
        for penalties in PENALTIES
    ]
    logits = (torch.randn(len(cases), vocab) * 2).to(dtype)
    counts = torch.randint(0, 4, (len(cases) + 1, vocab), dtype=torch.int32, device=DEVICE)
    in_prompt = torch.rand(len(cases) + 1, vocab, device=DEVICE) < 0.3
    masks = None
    if is_masked:
        bits = torch.randint(-(2**31), 2**31, (len(cases), -(-vocab // 32)), device=DEVICE).int()
        masks = RowMasks(torch.arange(len(cases), dtype=torch.int32, device=DEVICE), bits)

    def tell(state: DeviceState) -> None:
        state.output_counts.copy_(counts)
        state.in_prompt.copy_(in_prompt)

    ours, reference = both(logits, cases, masks, tell=tell)
    same = (ours == reference).float()
    assert same[: len(cases) // 2].all(), "greedy"
    assert same.mean() >= 1 - 2 * NEAR_TIES
    free, _ = both(logits, [SamplingParams(temperature=0)] * len(cases), masks)
    assert (ours != free)[1 : len(PENALTIES)].any(), "penalties that change nothing"


def test_the_padding_slot_is_not_penalised() -> None:
    """Its repetition penalty is 0, as all that nobody set."""
    state = make_state([SamplingParams(temperature=0)], 300)
    slots = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    logits = torch.randn(3, 300, device=DEVICE)
    tokens = sample_slots_triton(state, logits, slots, slots, None)
    assert torch.equal(tokens, logits.argmax(1).int())
    assert not state.output_counts.any()


def test_a_row_draws_the_same_whoever_is_beside_it_and_whatever_type_its_logits_have() -> None:
    """In a captured step, in the full way beside a row that needs it, and alone."""
    vocab = 3000
    names = ["none", "few", "nucleus", "floor", "together"]
    params = [SamplingParams(temperature=0.9, **FILTERS[name]) for name in names]
    logits = (torch.randn(len(params), vocab) * 3).to(BF16).to(DEVICE)
    slots = torch.arange(1, len(params) + 1, device=DEVICE).int()
    state = make_state(params, vocab)
    together = sample_slots_triton(state, logits, slots, None, None).tolist()
    in_full = sample_fully(sample_slots_triton, state, logits, slots, None, NO_FEATURE, None)
    alone = [
        sample_slots_triton(state, logits[i : i + 1], slots[i : i + 1], None, None).item()
        for i in range(len(params))
    ]
    assert together == in_full.tolist() == alone


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in an interpreter")
@pytest.mark.parametrize("name", ["temperature", "hot", "top_p", "top_k", "min_p", "together"])
def test_frequencies(name: str) -> None:
    fields = SINGLES.get(name, FILTERS["together"])
    count = 20000
    params = [SamplingParams(**fields)] * count
    state = make_state(params, len(make_logits()))
    slots = torch.arange(1, count + 1, device=DEVICE).int()
    tokens = sample_slots_triton(
        state, make_logits().to(DEVICE).expand(count, -1).contiguous(), slots, None, None
    )
    drawn = np.bincount(tokens.cpu().numpy(), minlength=len(make_logits()))
    assert score(drawn, expected(fields)) < MAX_SCORE
