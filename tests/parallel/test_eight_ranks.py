"""Eight processes, and four: greedy tokens of one rank. Of CPUs what can be shown of such hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from tests.models.tiny_checkpoints import CONFIGS, SHAPE, llama, random_reference
from tests.parallel.engines import answers, expect_same
from tests.parallel.test_models_on_ranks import ARGS, ASKS
from tests.waiting import run

pytestmark = pytest.mark.slow
# Pairs of ranks have the same head of k and v.
EIGHT_HEADS = llama(
    hidden_size=64, intermediate_size=64, num_attention_heads=8, num_key_value_heads=4
)
EIGHT_EXPERTS = type(CONFIGS["qwen3-moe"])(
    **SHAPE | {"num_key_value_heads": 4}, head_dim=16, num_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (EIGHT_HEADS, {"tensor_parallel_size": 8}),
        (EIGHT_HEADS, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
        (EIGHT_EXPERTS, {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    ],
    ids=["tp8", "tp4-pp2", "ep4"],
)
def test_answers_of_one_rank(
    config: PretrainedConfig, ranks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with torch.inference_mode():
        random_reference(config).save_pretrained(tmp_path)
    expected = run(answers(tmp_path, ASKS, **ARGS))
    # Loaded cores are no sign of a lost rank.
    args = ARGS | ranks | {"distributed_timeout_seconds": 60}
    expect_same(run(answers(tmp_path, ASKS, **args)), expected)
