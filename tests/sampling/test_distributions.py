"""How often the sampler draws each token, against float64 probabilities, by chi-square.

Thousands of seeds draw in one batch, in which rows of every case are mixed. The seeds are fixed, so
a result is the same on every run; the bound is one that chance passes once in 30,000 cases.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import SamplingParams
from tests.sampling.reference import reference_probs
from tests.worker.test_sampler import VOCAB, Rig

NUM_DRAWS = 2000  # per case
MAX_SCORE = 4.0  # standard deviations
PROMPT = [1, 2, 3]  # as in Rig, like the two below
STOP_IDS = frozenset({7})
BAD_WORDS = ((9,), (5, 6))
OUTPUTS = [4, 4, 9, 4, 5]  # the last is the beginning of a bad word

SINGLES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 6},
    "min_p": {"min_p": 0.15},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "negative_penalties": {"presence_penalty": -0.7, "frequency_penalty": -0.3},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "repetition_reward": {"repetition_penalty": 0.6},
    "logit_bias": {"logit_bias": {4: -1.0, 20: 2.0, 30: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [2, 4, 5, 6, 7, 9, 20]},
    "bad_words": {"bad_words": ["as BAD_WORDS"]},
    "min_tokens": {"min_tokens": 9},
}
# One of each pair of kinds; of a parameter with itself there is nothing to mix.
PAIRS = {
    f"{first}+{second}": SINGLES[first] | SINGLES[second]
    for first, second in itertools.combinations(SINGLES, 2)
    if not SINGLES[first].keys() & SINGLES[second].keys()
}
EVERYTHING = {
    "temperature": 1.3, "top_p": 0.9, "top_k": 12, "min_p": 0.02, "presence_penalty": 0.4,
    "frequency_penalty": 0.2, "repetition_penalty": 1.2, "logit_bias": {20: 1.0, 4: 0.5},
    "allowed_token_ids": list(range(3, 30)), "bad_words": ["as BAD_WORDS"], "min_tokens": 9,
}  # fmt: skip
CASES = {"nothing": {}, **SINGLES, "everything": EVERYTHING}


def make_logits() -> torch.Tensor:
    """[VOCAB], no two alike; the tokens that penalties and bans are about are likely ones."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    for token, value in {1: 1.4, 2: -0.6, 4: 2.1, 5: 1.1, 6: 1.7, 7: 1.9, 9: 1.6, 20: 0.87}.items():
        logits[token] = value
    return logits


def expected(fields: dict[str, Any]) -> np.ndarray:
    params = SamplingParams(**fields)
    words = BAD_WORDS if params.bad_words else ()
    probs = reference_probs(make_logits().tolist(), params, PROMPT, OUTPUTS, STOP_IDS, words)
    return np.array(probs)


def draw(cases: dict[str, dict[str, Any]], count: int) -> dict[str, np.ndarray]:
    """How often each token came, per case, of `count` draws; the rows of the cases alternate."""
    rows = [(name, seed + 1) for seed in range(count) for name in cases]
    params = {name: SamplingParams(**fields) for name, fields in cases.items()}
    rig = Rig(*(params[name] for name, _ in rows), outputs=OUTPUTS)
    for seq, (_, seed) in zip(rig.seqs, rows, strict=True):
        seq.seed = seed
    tokens = rig.sample(make_logits().expand(len(rows), VOCAB))
    drawn = {name: np.zeros(VOCAB, int) for name in cases}
    for (name, _), token in zip(rows, tokens, strict=True):
        drawn[name][token] += 1
    return drawn


@cache
def draws_of_cases() -> dict[str, np.ndarray]:
    return draw(CASES, NUM_DRAWS)


def score(drawn: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square as standard deviations (Wilson and Hilferty); what is rare is one cell."""
    assert not drawn[probs == 0].any(), f"impossible tokens: {np.flatnonzero(drawn * (probs == 0))}"
    wanted = probs * drawn.sum()
    rare = wanted < 5
    cells = [
        *zip(drawn[~rare], wanted[~rare], strict=True),
        (drawn[rare].sum(), wanted[rare].sum()),
    ]
    cells = [(seen, want) for seen, want in cells if want >= 1]
    chi_square = sum((seen - want) ** 2 / want for seen, want in cells)
    freedom = max(len(cells) - 1, 1)
    variance = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - variance)) / math.sqrt(variance))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_parameter(name: str) -> None:
    assert score(draws_of_cases()[name], expected(CASES[name])) < MAX_SCORE


@pytest.mark.slow
def test_each_pair() -> None:
    drawn = draw(PAIRS, 300)
    scores = {name: score(drawn[name], expected(fields)) for name, fields in PAIRS.items()}
    assert max(scores.values()) < MAX_SCORE, sorted(scores.items(), key=lambda s: -s[1])[:5]


@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLES)
def test_the_bound_would_see_a_parameter_that_does_nothing(name: str) -> None:
    without = expected({})
    drawn = draws_of_cases()[name]
    missed = not drawn[expected(SINGLES[name]) == 0].any()
    assert missed and score(drawn, without) > 1.5 * MAX_SCORE


@pytest.mark.parametrize("name", CASES)
def test_greedy_rows_take_the_best_that_is_left(name: str) -> None:
    fields = CASES[name] | {"temperature": 0}
    drawn = draw({name: fields}, 1)[name]
    assert drawn.argmax() == expected(fields).argmax()


def test_a_batch_of_one_kind_draws_as_a_mixed_one() -> None:
    """Plain rows alone are sampled without a sort: the same tokens, by the same seeds."""
    alone = draw({"hot": SINGLES["hot"]}, 500)["hot"]
    mixed = draw({"hot": SINGLES["hot"], "everything": EVERYTHING}, 500)["hot"]
    assert (alone == mixed).all()
