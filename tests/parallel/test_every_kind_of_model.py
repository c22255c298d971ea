"""A mixture, a quantised mixture and adapters, divided in every way: one rank's answers.

Each in two regimes: one ahead with swapped sequences, and synchronous with recomputed ones; both
with chunks of prompts, shared prefixes, sampling with seeds, and a grammar.
"""

from __future__ import annotations

import asyncio
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from asyncllm import AsyncLLMEngine, LoRARequest, RequestOutput
from asyncllm.model_config import ModelConfig, resolve_model_path
from tests.engine.adapter_files import write_tiny_adapter
from tests.models.tiny_checkpoints import random_reference
from tests.parallel.engines import SMALL, expect_same
from tests.parallel.test_two_ranks import ASKS
from tests.waiting import run

pytestmark = pytest.mark.slow
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
DP2: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_backend": "uni"}
EP2: dict[str, Any] = TP2 | {"enable_expert_parallel": True}
CHUNKS: dict[str, Any] = {
    "chunked_prefill_size": 5, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 24,
    "max_model_len": 80, "dtype": "float32",
}  # fmt: skip
REGIMES: dict[str, dict[str, Any]] = {
    "ahead-swap": CHUNKS | {"async_scheduling": True, "preemption_mode": "swap"},
    "synchronous-recompute": CHUNKS | {"async_scheduling": False, "preemption_mode": "recompute"},
}
KINDS: dict[str, dict[str, Any]] = {
    "mixture": {},
    "quantised": {"quantization": "int4"},
    "adapters": {"enable_lora": True, "max_loras": 2},
}
CASES = [
    *(("mixture", ranks) for ranks in (TP2, PP2, TP2 | PP2, EP2, DP2)),
    *(("quantised", ranks) for ranks in (TP2, PP2, EP2, EP2 | PP2, DP2)),
    *(("adapters", ranks) for ranks in (TP2, PP2, TP2 | PP2, DP2)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with the built-in model's tokenizer, and two adapters of the built-in model."""
    folder, tiny = tmp_path_factory.mktemp("kinds"), resolve_model_path("tiny")
    config = Qwen3MoeConfig(
        vocab_size=ModelConfig.from_folder(tiny).vocab_size,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    with torch.inference_mode():
        random_reference(config).save_pretrained(folder)
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, folder)
    for seed in (1, 2):
        write_tiny_adapter(folder / f"adapter {seed}", seed)
    return folder


async def answered(folder: Path, kind: str, **args: Any) -> list[RequestOutput]:
    model = "tiny" if kind == "adapters" else str(folder)
    loras: list[LoRARequest | None] = [None]
    if kind == "adapters":
        loras += [LoRARequest(name, lora_path=folder / name) for name in ("adapter 1", "adapter 2")]
    async with AsyncLLMEngine(model, **SMALL | KINDS[kind] | args) as engine:
        asks = [
            engine.generate(*ask, lora_request=loras[place % len(loras)])
            for place, ask in enumerate(ASKS)
        ]
        outputs = list(await asyncio.gather(*asks))
        engine.check_idle()
        engine.check_integrity()
    return outputs


@cache
def of_one_rank(folder: Path, kind: str, regime: str) -> list[RequestOutput]:
    return run(answered(folder, kind, **REGIMES[regime]))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("kind", "ranks"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_answers_of_one_rank(folder: Path, kind: str, ranks: dict[str, Any], regime: str) -> None:
    ours = run(answered(folder, kind, **REGIMES[regime], **ranks))
    expect_same(ours, of_one_rank(folder, kind, regime))
