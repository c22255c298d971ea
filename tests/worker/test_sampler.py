"""The sampler against brute force: what each parameter keeps, forbids and how often it draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import SamplingParams
from asyncllm.outputs import RequestMetrics
from asyncllm.step_plan import DecodeBatch, SlotInit, StepPlan
from asyncllm.types import NO_TOKEN_LEFT, NON_FINITE_TOKEN, Request, Sequence
from asyncllm.worker.device_state import DeviceState, gather_slots_torch
from asyncllm.worker.packed_step import PLAIN, Feature
from asyncllm.worker.sampler import (
    cutoffs,
    gather_logprobs,
    gumbel_noise,
    sample_fully,
    sample_slots_torch,
)
from asyncllm.worker.slot_changes import write_slots_torch
from asyncllm.worker.staging import Staging
from asyncllm.worker.step_packer import StepPacker
from asyncllm.worker.token_masks import NO_MASK, RowMasks
from tests.sampling.reference import filtered

VOCAB = 40
CPU = torch.device("cpu")


class Rig:
    """Sequences in slots 1, 2, ... and one decode step's sampling for all of them."""

    def __init__(self, *params: SamplingParams, outputs: list[int] | None = None) -> None:
        self.packer = StepPacker(num_slots=len(params) + 1, block_size=4)
        self.state = DeviceState(len(params) + 1, 8, VOCAB, CPU)
        self.seqs = [self._sequence(i, p, outputs or []) for i, p in enumerate(params)]
        self.inits = tuple(
            SlotInit(s, s.slot, [[1]], len(s.token_ids) - 1, list(s.token_ids)) for s in self.seqs
        )

    @staticmethod
    def _sequence(i: int, params: SamplingParams, outputs: list[int]) -> Sequence:
        prompt = [1, 2, 3]
        request = Request(
            str(i), None, prompt, params, params.max_tokens or 99, frozenset({7}),
            RequestMetrics(0.0), bad_words_ids=((9,), (5, 6)) if params.bad_words else (),
        )  # fmt: skip
        seq = Sequence(i, request, 0, params.seed or 17, prompt + outputs)
        seq.slot, seq.num_in_flight = i + 1, 1  # as right after the plan of this step
        return seq

    def sample(self, logits: torch.Tensor) -> list[int]:
        for seq in self.seqs:
            seq.num_computed = len(seq.token_ids) - 1
        plan = StepPlan(1, DecodeBatch.of(self.seqs), (), slot_inits=self.inits)
        inputs = self.packer.pack(plan)
        extras = inputs.extras
        if plan.needs_host:
            extras = extras._replace(edits=self.packer.pack_edits(inputs))
        tensors = Staging(CPU).upload(extras)
        if plan.slot_inits:
            records, entries = inputs.changes.records, inputs.changes.entries
            assert records is not None and entries is not None
            write_slots_torch(self.state, torch.tensor(records), torch.tensor(entries))
        self.state.apply(tensors)
        self.inits = ()
        slots = torch.tensor([s.slot for s in self.seqs])
        positions = torch.tensor([len(s.token_ids) for s in self.seqs], dtype=torch.int32)
        gather_slots_torch(self.state, slots)
        if inputs.features & ~PLAIN:
            tokens = sample_fully(
                sample_slots_torch, self.state, logits, slots, positions, inputs.features,
                tensors.edits,
            )  # fmt: skip
        else:
            tokens = sample_slots_torch(self.state, logits, slots, positions, None)
        return tokens.tolist()


def row(**raised: float) -> torch.Tensor:
    """[1, VOCAB] logits, falling with the token id, some raised: row(t9=5.0)."""
    logits = torch.linspace(1, -1, VOCAB)
    for name, value in raised.items():
        logits[int(name[1:])] = value
    return logits.unsqueeze(0)


def draws(params: dict[str, Any], logits: torch.Tensor, count: int = 400) -> list[int]:
    """`count` independent draws: as many rows with seeds of their own."""
    rig = Rig(*(SamplingParams(seed=i + 1, **params) for i in range(count)))
    return rig.sample(logits.expand(count, VOCAB))


def test_greedy_takes_the_first_maximum() -> None:
    assert Rig(SamplingParams(temperature=0)).sample(row(t11=3.0, t20=3.0)) == [11]


def test_gumbel_noise_is_standard_and_depends_on_all_of_its_key() -> None:
    seeds = torch.arange(64) * 2**33 + 5
    noise = gumbel_noise(seeds, torch.full((64,), 9), 4000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.05)
    same = gumbel_noise(seeds[:1], torch.tensor([9]), 4000)
    assert torch.equal(same, noise[:1])
    for seed, position in ((seeds[:1] + 1, 9), (seeds[:1] + 2**32, 9), (seeds[:1], 10)):
        other = gumbel_noise(seed, torch.tensor([position]), 4000)
        correlation = torch.corrcoef(torch.cat([other, noise[:1]]))[0, 1].item()
        assert abs(correlation) < 0.06


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = row(t3=2.5, t8=2.0)
    count = 6000
    drawn = np.bincount(draws({"temperature": temperature}, logits, count), minlength=VOCAB)
    expected = (logits[0] / temperature).softmax(0).numpy() * count
    chi_square = float(((drawn - expected) ** 2 / expected).sum())
    assert chi_square < 85  # 39 degrees of freedom: p < 3e-5


def test_neighbouring_seeds_draw_independently() -> None:
    drawn = draws({"temperature": 1.0}, torch.zeros(1, VOCAB), 4000)
    pairs = np.bincount(np.array(drawn[:-1]) * VOCAB + drawn[1:], minlength=VOCAB**2)
    expected = 3999 / VOCAB**2
    chi_square = float(((pairs - expected) ** 2 / expected).sum())
    assert chi_square < VOCAB**2 + 5 * np.sqrt(2 * VOCAB**2)


def test_top_k_keeps_k() -> None:
    assert set(draws({"top_k": 3}, row())) == {0, 1, 2}
    assert set(draws({"top_k": 1}, row(t9=9.0))) == {9}
    assert len(set(draws({"top_k": 10**6}, row()))) > 30


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :4] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert set(draws({"top_p": 0.45}, logits)) == {0}
    assert set(draws({"top_p": 0.7}, logits)) == {0, 1}
    assert set(draws({"top_p": 0.8}, logits)) == {0, 1, 2}
    assert set(draws({"top_p": 0.01}, logits)) == {0}


def test_min_p_is_a_share_of_the_best() -> None:
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :3] = torch.tensor([0.6, 0.29, 0.11]).log()
    assert set(draws({"min_p": 0.4}, logits)) == {0, 1}
    assert set(draws({"min_p": 0.1}, logits)) == {0, 1, 2}
    assert set(draws({"min_p": 1.0}, logits)) == {0}


def test_filters_apply_after_temperature() -> None:
    logits = torch.full((1, VOCAB), -300.0)
    logits[0, :2] = torch.tensor([0.8, 0.2]).log()
    assert set(draws({"top_p": 0.75, "temperature": 1.0}, logits)) == {0}
    assert set(draws({"top_p": 0.75, "temperature": 4.0}, logits)) == {0, 1}


def test_unfiltered_rows_are_untouched_by_their_neighbours() -> None:
    plain = SamplingParams(seed=5)
    others = [
        SamplingParams(top_k=2, seed=1),
        SamplingParams(temperature=0, frequency_penalty=1.0),
        SamplingParams(allowed_token_ids=[4], seed=2),
        SamplingParams(logit_bias={3: 50.0}, seed=3),
    ]
    alone = Rig(plain).sample(row())
    together = Rig(plain, *others).sample(row().expand(5, VOCAB))
    assert together[0] == alone[0]
    assert together[3] == 4 and together[4] == 3


def test_penalties_as_vllm_defines_them() -> None:
    outputs = [10, 10, 11]
    cases = [
        ({"frequency_penalty": 1.0}, 10, 3.0 - 2.0),
        ({"presence_penalty": 1.0}, 10, 3.0 - 1.0),
        ({"repetition_penalty": 2.0}, 10, 3.0 / 2.0),
        ({"repetition_penalty": 2.0}, 2, 3.0 / 2.0),  # of the prompt as well
        ({"frequency_penalty": 2.0}, 2, 3.0),  # of the output only
    ]
    for params, token, left in cases:
        for rival, winner in ((left - 0.1, token), (left + 0.1, 30)):
            rig = Rig(SamplingParams(temperature=0, **params), outputs=outputs)
            logits = row(**{f"t{token}": 3.0, "t30": rival})
            logits[logits <= 1] = -9.0
            logits[0, 30] = rival
            assert rig.sample(logits) == [winner], (params, token)


def test_negative_logits_are_multiplied_by_the_repetition_penalty() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 2], logits[0, 30] = -1.0, -1.5
    assert Rig(SamplingParams(temperature=0, repetition_penalty=2.0)).sample(logits) == [30]


def test_sampled_tokens_are_counted_on_the_device() -> None:
    rig = Rig(SamplingParams(temperature=0, frequency_penalty=2.0))
    assert rig.sample(row(t9=5.0, t8=4.0)) == [9]
    assert rig.sample(row(t9=5.0, t8=4.0)) == [8]  # 9 was counted without the host


def test_bias_bad_words_and_min_tokens() -> None:
    greedy: dict[str, Any] = {"temperature": 0}
    assert Rig(SamplingParams(**greedy, logit_bias={20: 100.0})).sample(row()) == [20]
    assert Rig(SamplingParams(**greedy, bad_words=["x"])).sample(row(t9=9.0, t8=8.0)) == [8]
    second = Rig(SamplingParams(**greedy, bad_words=["x"]), outputs=[4, 5])
    assert second.sample(row(t6=9.0, t8=8.0)) == [8]  # 5 was just said, so 6 must not follow
    free = Rig(SamplingParams(**greedy, bad_words=["x"]), outputs=[5, 4])
    assert free.sample(row(t6=9.0, t8=8.0)) == [6]
    for said, expected in (([], 8), ([4], 8), ([4, 4], 7)):
        rig = Rig(SamplingParams(**greedy, min_tokens=2), outputs=said)
        assert rig.sample(row(t7=9.0, t8=8.0)) == [expected]  # 7 is the stop token


def test_a_restriction_ends_with_its_sequence() -> None:
    rig = Rig(SamplingParams(temperature=0, allowed_token_ids=[30, 31]))
    assert rig.sample(row()) == [30]
    successor = Rig(SamplingParams(temperature=0))
    rig.seqs, rig.inits = successor.seqs, successor.inits
    assert rig.sample(row()) == [0]
    both = Rig(SamplingParams(temperature=0, allowed_token_ids=[30]), SamplingParams(temperature=0))
    assert both.sample(row().expand(2, VOCAB)) == [30, 0]


@pytest.mark.parametrize("in_slots", [False, True])
def test_masked_rows_sampled_plainly_are_those_of_the_full_way(in_slots: bool) -> None:
    """Greedy or not, masked or not, finite or not; `in_slots`: after a decode step."""
    generator = torch.Generator().manual_seed(3)
    rows = 60
    logits = torch.randn(rows, VOCAB, generator=generator) * 3
    logits[7, 3], logits[8, 5], logits[9] = float("nan"), float("inf"), -float("inf")
    of_row = torch.arange(rows, dtype=torch.int32)
    of_row[::4] = NO_MASK
    bits = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).int()
    bits[10], bits[11] = 0, torch.tensor([1 << 9, 0])
    logits[11, 9] = -float("inf")  # the only token that it allows
    positions = torch.randint(5, 99, (rows,), generator=generator, dtype=torch.int32)
    results = []
    for plainly in (True, False):
        rig = Rig(*(SamplingParams(temperature=i % 3 / 2, seed=i + 1) for i in range(rows)))
        rig.sample(torch.zeros(rows, VOCAB))  # the slots know their parameters
        slots = torch.arange(1, rows + 1, dtype=torch.int32)
        given = None if in_slots else positions
        if in_slots:
            rig.state.positions[slots] = positions
        masks = RowMasks(of_row, bits)
        if plainly:
            tokens = sample_slots_torch(rig.state, logits, slots, given, masks)
        else:
            tokens = sample_fully(
                sample_slots_torch, rig.state, logits, slots, given, Feature.MASK, None, masks
            )
        results.append((tokens, rig.state.last_tokens, rig.state.positions))
    (ours, *our_state), (expected, *expected_state) = results
    assert torch.equal(ours, expected)
    assert torch.equal(torch.stack(our_state), torch.stack(expected_state))
    assert torch.equal(our_state[1][1:], positions)
    assert ours[[7, 8, 10]].tolist() == [NON_FINITE_TOKEN] * 3
    assert ours[9] >= 0 and ours[11] == 9, "what a mask allows is possible whatever forbids it"


def test_a_row_that_forbids_every_token_says_so() -> None:
    """Its neighbours sample as without it."""
    random = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.01}
    params = [
        SamplingParams(**random, seed=1),
        SamplingParams(**random, seed=2, allowed_token_ids=[7], min_tokens=2),
        SamplingParams(**random, seed=3, allowed_token_ids=[4, 5]),
        SamplingParams(temperature=0, allowed_token_ids=[7], min_tokens=2),
    ]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    rig = Rig(*params)
    tokens = rig.sample(logits)
    alone = Rig(params[0], params[2]).sample(logits[[0, 2]])
    assert tokens == [alone[0], NO_TOKEN_LEFT, alone[1], NO_TOKEN_LEFT]
    assert 0 <= rig.state.last_tokens[2] < VOCAB and 0 <= rig.state.last_tokens[4] < VOCAB


def test_a_poisoned_row_is_not_said_to_have_forbidden_its_tokens() -> None:
    rig = Rig(SamplingParams(allowed_token_ids=[7], min_tokens=2))
    assert rig.sample(torch.full((1, VOCAB), float("nan"))) == [NON_FINITE_TOKEN]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([4, 0, 39])
    result = gather_logprobs(logits, tokens, 5)
    reference = logits.log_softmax(1)
    assert torch.allclose(result.logprobs, reference[range(3), tokens])
    order = reference.argsort(dim=1, descending=True)
    assert torch.equal(result.top_ids, order[:, :5])
    for i, token in enumerate(tokens.tolist()):
        assert result.ranks[i].item() == order[i].tolist().index(token) + 1
    assert gather_logprobs(logits, tokens, 0).top_ids.shape == (3, 0)


def test_cutoffs_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(60, VOCAB, generator=generator) * 3
    logits[30:] = (logits[30:] / 2).round()  # with many ties
    top_ks = torch.randint(0, 12, (60,), generator=generator, dtype=torch.int32)
    top_ps = torch.rand(60, generator=generator).clamp(min=0.05)
    min_ps = torch.rand(60, generator=generator) / 4
    top_ps[::5], min_ps[::3] = 1.0, 0.0
    kept = logits >= cutoffs(logits, top_ks, top_ps, min_ps)
    for i in range(60):
        params = SamplingParams(
            top_k=int(top_ks[i]), top_p=top_ps[i].item(), min_p=min_ps[i].item()
        )
        expected = [p > 0 for p in filtered(logits[i].tolist(), params)]
        assert kept[i].tolist() == expected


def test_of_equals_all_are_kept_or_none() -> None:
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, [3, 8, 9, 20]] = torch.tensor([0.4, 0.25, 0.25, 0.1]).log()
    for params in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert set(draws(params, logits)) == {3, 8, 9}
    assert len(set(draws({"top_p": 0.1}, torch.zeros(1, VOCAB)))) == VOCAB
