"""The checks of made-up shapes, on the CPU: they pass, and fail where a state or a page is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.attention.state_cache import StateCache
from asyncllm.step_plan import StateMoves
from tests.script_module import import_script

SCRIPTS = Path(__file__).parent.parent / "scripts"
ON_CPU = {
    "device": "cpu",
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 400,
    "max_model_len": 240,
}
NARROW = {
    "vocab_size": 5200, "hidden_size": 128, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 16,
    "num_experts_per_tok": 4,
}  # fmt: skip
CACHED = "cached = cold"
RECOMPUTED = "preempted (recompute) = never"  # from the last snapshot on
SWAPPED = "preempted (swap) = never"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    checks = import_script(SCRIPTS / "shape_checks.py")
    monkeypatch.setattr(checks, "PROMPTS", checks.PROMPTS[3:9:2])
    monkeypatch.setattr(checks, "OTHERS", checks.OTHERS[3:9:2])
    monkeypatch.setattr(checks, "BLOCKS", 17)
    return checks


def check(checks: Any, folder: Path) -> str:
    shapes = import_script(SCRIPTS / "model_shapes.py")
    shape = shapes.SHAPES["qwen3-next-128-experts"] | NARROW
    result = asyncio.run(checks.check("narrow", shapes.Case(shape, ON_CPU), folder))
    assert isinstance(result["checks"], str)
    return result["checks"]


def lose(moves: StateMoves) -> StateMoves:
    return moves._replace(restore=tuple((0, slot) for _, slot in moves.restore))


def swap_lose(moves: StateMoves) -> StateMoves:
    return moves._replace(swap_in=())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda moves: moves, "ok"),
        (lose, f"FAIL: {CACHED}, {RECOMPUTED}"),
        (swap_lose, f"FAIL: {SWAPPED}"),
    ],
    ids=["as it is", "states of prefix hits lost", "swapped states lost"],
)
def test_a_lost_state_fails_its_check_and_rounding_none(
    change: Callable[[StateMoves], StateMoves],
    expected: str,
    checks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before_step = StateCache.before_step
    monkeypatch.setattr(
        StateCache, "before_step", lambda states, moves: before_step(states, change(moves))
    )
    assert check(checks, tmp_path) == expected
    explained = capsys.readouterr().out.count("with routers that choose the same experts always")
    assert explained == expected.count("preempted")


@pytest.mark.parametrize(("moved", "expected"), [(0.02, True), (0.03, False), (torch.nan, False)])
def test_answers_are_compared_by_the_effect_of_contexts(
    moved: float, expected: bool, checks: Any
) -> None:
    plain, effect = torch.zeros(3, 3, 4), torch.tensor([1.0, 0.1, 1.0])
    ours = plain.clone()
    ours[1] += moved
    answers = (checks.Answers(scores, 0, []) for scores in (ours, plain))
    assert checks.compare(*answers, effect)[0] is expected
