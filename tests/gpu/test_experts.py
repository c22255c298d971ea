"""The experts' kernel against plain torch; without a CUDA device in Triton's interpreter."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.kernels.records import (
    SILU,
    Activation,
    ExpertRange,
    ExpertWeights,
    Normed,
    Routed,
    Routing,
)
from asyncllm.models.layers.torch_ops import grouped_experts
from asyncllm.models.layers.torch_ops import route as torch_route

triton = pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
if ON_GPU:
    pytestmark = pytest.mark.gpu
elif tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and np.__version__ >= "2.4":
    pytest.skip("this Triton's interpreter knows no numpy 2.4", allow_module_level=True)

TOLERANCE = 8e-3 if ON_GPU else 4e-3  # of its dtype
CLAMPED = Activation("clamped", limit=1.0, alpha=1.702)
GELU = Activation("gelu_tanh")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def make_weights(
    num_experts: int, hidden: int, size: int, activation: Activation, biased: bool
) -> ExpertWeights:
    biases = (
        (random(num_experts, 2 * size), random(num_experts, hidden)) if biased else (None, None)
    )
    gate_up = random(num_experts, 2 * size, hidden) / hidden**0.5
    return ExpertWeights(
        gate_up, random(num_experts, hidden, size) / size**0.5, *biases, activation
    )


def make_routed(num_tokens: int, num_experts: int, top_k: int) -> Routed:
    scores = torch.rand(num_tokens, num_experts, device=DEVICE)
    gates, ids = scores.topk(top_k)
    return Routed(ids, gates)


def relative_error(ours: torch.Tensor, x: torch.Tensor, w: ExpertWeights, routed: Routed) -> float:
    """Against float32 over the same half-precision inputs."""
    full = [None if each is None else each.float() for each in (w.gate_up_bias, w.down_bias)]
    weights = ExpertWeights(w.gate_up.float(), w.down.float(), *full, w.activation)
    exact = grouped_experts(x.float(), weights, routed)
    return ((ours.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "activation", "biased"),
    [
        (1, 8, 2, SILU, False),  # by assignment
        (2, 16, 3, GELU, True),
        (3, 16, 3, GELU, False),
        (16, 8, 2, SILU, True),  # by expert: there are fewer than assignments
        (17, 6, 4, CLAMPED, True),
        (64, 5, 1, SILU, False),
        (65, 5, 2, SILU, True),  # sorted
        (90, 12, 4, CLAMPED, True),
        *([(600, 8, 2, SILU, False), (600, 8, 4, CLAMPED, True)] if ON_GPU else []),  # large tiles
    ],
)
def test_equals_torch(
    num_tokens: int, num_experts: int, top_k: int, activation: Activation, biased: bool
) -> None:
    from asyncllm.kernels.experts.kernel import experts, takes

    hidden, size = 144, 80  # a multiple of no tile
    weights = make_weights(num_experts, hidden, size, activation, biased)
    assert takes(weights)
    x, routed = random(num_tokens, hidden), make_routed(num_tokens, num_experts, top_k)
    ours = experts(Normed(x), weights, routed)
    assert relative_error(ours, x, weights, routed) < TOLERANCE


@pytest.mark.parametrize("num_ranks", [2, 3, 6])
@pytest.mark.parametrize("num_tokens", [1, 3, 30, 90])
def test_experts_of_a_rank(
    num_tokens: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the others add nothing, though nobody writes their rows; padding has none."""
    from asyncllm.kernels.experts.kernel import experts

    weights, x = make_weights(6, 64, 32, SILU, biased=True), random(num_tokens, 64)
    make = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *sizes: Any, **more: Any) -> torch.Tensor:
        made = make(self, *sizes, **more)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    routed = make_routed(num_tokens, 6, 2)
    padding = slice(num_tokens - num_tokens // 3, num_tokens)
    routed.ids[padding] = 6
    summed = torch.zeros_like(x, dtype=torch.float32)
    for first in range(0, 6, 6 // num_ranks):
        parts = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
        own = (None if part is None else part[first : first + 6 // num_ranks] for part in parts)
        part = replace(routed, own=ExpertRange(first, 6))
        summed += experts(Normed(x), ExpertWeights(*own, SILU), part).float()
    assert (summed[padding] == 0).all()
    routed.ids[padding], routed.gates[padding] = 0, 0
    assert relative_error(summed, x, weights, routed) < TOLERANCE


def test_all_tokens_take_the_same_experts() -> None:
    from asyncllm.kernels.experts.kernel import experts

    weights = make_weights(7, 64, 32, SILU, biased=False)
    for num_tokens in (20, 100):
        ids = torch.tensor([[5, 2]], device=DEVICE).expand(num_tokens, 2).contiguous()
        routed = Routed(ids, torch.rand(num_tokens, 2, device=DEVICE))
        x = random(num_tokens, 64)
        ours = experts(Normed(x), weights, routed)
        assert relative_error(ours, x, weights, routed) < TOLERANCE


def test_a_factor_that_is_still_to_come() -> None:
    from asyncllm.kernels.experts.kernel import experts

    weights, routed = make_weights(8, 64, 32, SILU, biased=True), make_routed(1, 8, 2)
    x = Normed(random(1, 64), torch.rand(1, 5, device=DEVICE) * 64, 1e-5)
    ours = experts(x, weights, routed)
    assert relative_error(ours, x.whole(), weights, routed) < TOLERANCE


def test_sizes_that_it_does_not_take() -> None:
    from asyncllm.kernels.experts.kernel import takes

    assert not takes(make_weights(2, 72, 32, SILU, biased=False))
    weights = make_weights(2, 64, 32, SILU, biased=False)
    full = ExpertWeights(weights.gate_up.float(), weights.down.float(), None, None, SILU)
    assert not takes(full)


@pytest.mark.parametrize(
    ("routing", "corrected"),
    [
        (Routing(8, renormalise=True), False),
        (Routing(3), False),
        (Routing(5, "sigmoid", True, scale=2.5, least_sum=1e-20), True),
        (Routing(4, "top_softmax"), False),
    ],
)
def test_routing_equals_torch(routing: Routing, corrected: bool) -> None:
    from asyncllm.kernels.route.kernel import route, takes

    assert takes(routing) and not takes(Routing(2, num_groups=2))
    logits = torch.randn(9, 50, device=DEVICE)
    correction = torch.randn(50, device=DEVICE) if corrected else None
    for slots in None, torch.arange(9, dtype=torch.int32, device=DEVICE) % 4:
        ours = route(logits, correction, routing, slots)
        exact = torch_route(logits, correction, routing, slots)
        assert torch.equal(ours.ids.long(), exact.ids)
        torch.testing.assert_close(ours.gates, exact.gates)
    assert (ours.ids[4] == 50).all() and (ours.ids[3] < 50).all()  # of the padding slot


@pytest.mark.parametrize("num_experts", [60, 160, 64])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "top_softmax"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_routing_of_logits_that_are_not_finite(
    num_experts: int, score: Any, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are those of different experts, so that no product reads behind their weights; NaN stays
    NaN in the gates, so that the token's logits say it."""
    from asyncllm.kernels.route.kernel import route

    if not ON_GPU:  # the interpreter's own argmax takes NaN for the greatest; a comparison does not
        reductions = importlib.import_module("triton.runtime.interpreter").ReduceOps
        monkeypatch.setattr(reductions, "apply_impl", reductions.generic_reduce)
    logits = torch.randn(5, num_experts, device=DEVICE)
    logits[1] = bad
    logits[2, num_experts // 2] = bad
    logits[3, 3:] = bad
    ours = route(logits, None, Routing(6, score, True))
    ids, gates = ours.ids, ours.gates
    assert ((ids >= 0) & (ids < num_experts)).all(), ids
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all(), ids
    if bad != bad:
        assert gates[1:4].isnan().any(dim=1).all()
    exact = torch_route(logits[::4], None, Routing(6, score, True))
    assert torch.equal(ids[::4].long(), exact.ids)
    torch.testing.assert_close(gates[::4], exact.gates)
