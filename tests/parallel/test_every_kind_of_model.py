"""Dense, mixture, quantised, with adapters: divided in every way each gives one rank's answers.

Each in two regimes: one ahead with swapped sequences, and synchronous with recomputed ones; the
dense model also in the other two. All with chunks of prompts, shared prefixes, sampling with seeds,
and a grammar. A step behind by a page table or a swapped page would change a token.
"""

from __future__ import annotations

import asyncio
import shutil
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from asyncllm import AsyncLLMEngine, LoRARequest, RequestOutput
from asyncllm.model_config import ModelConfig, resolve_model_path
from tests.engine.adapter_files import write_adapter, write_tiny_adapter
from tests.models.tiny_checkpoints import random_reference
from tests.parallel.engines import SMALL, expect_same, followers
from tests.parallel.test_two_ranks import ASKS
from tests.waiting import run

pytestmark = pytest.mark.slow
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
TP4: dict[str, Any] = {"tensor_parallel_size": 4}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
BY_EXPERT: dict[str, Any] = {"enable_expert_parallel": True}
# Fewer pages each, as each has half of the requests.
ENGINES: dict[str, Any] = {"data_parallel_size": 2, "num_gpu_blocks_override": 12}
WAYS: dict[str, dict[str, Any]] = {
    "tp2": TP2,
    "tp4": TP4,
    "pp2": PP2,
    "tp2-pp2": TP2 | PP2,
    "dp2": ENGINES | {"data_parallel_backend": "uni"},
    "dp2-ep2": ENGINES | BY_EXPERT,
    "dp2-tp2-ep4": ENGINES | TP2 | BY_EXPERT,
    "ep2": TP2 | BY_EXPERT,
    "ep2-pp2": TP2 | PP2 | BY_EXPERT,
}
CHUNKS: dict[str, Any] = {
    "chunked_prefill_size": 5, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 16,
    "max_model_len": 48, "dtype": "float32",
}  # fmt: skip
REGIMES: dict[str, dict[str, Any]] = {
    f"{name}-{mode}": CHUNKS | {"async_scheduling": is_ahead, "preemption_mode": mode}
    for name, is_ahead in (("ahead", True), ("synchronous", False))
    for mode in ("swap", "recompute")
}
TWO_REGIMES = ("ahead-swap", "synchronous-recompute")
ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixture": {},
    "quantised": {"quantization": "int4"},  # the mixture
    "adapters": ADAPTERS,  # of the dense model
    "expert-adapters": ADAPTERS,
}
DENSE_WAYS = ("tp2", "tp4", "pp2", "tp2-pp2", "dp2")
CASES = [
    *(("dense", way, regime) for way in DENSE_WAYS for regime in REGIMES),
    *(
        (kind, way, regime)
        for kind, ways in {
            "mixture": (*DENSE_WAYS, "ep2", "dp2-ep2", "dp2-tp2-ep4"),
            "quantised": (*DENSE_WAYS, "ep2", "ep2-pp2", "dp2-ep2"),
            "adapters": DENSE_WAYS,
            "expert-adapters": ("tp2", "ep2", "dp2-ep2", "dp2-tp2-ep4"),
        }.items()
        for way in ways
        for regime in TWO_REGIMES
    ),
]
NUM_EXPERTS = 4


def write_mixture_with_words(folder: Path, window: int = 256) -> Path:
    """A mixture with the built-in model's tokenizer."""
    tiny = resolve_model_path("tiny")
    config = Qwen3MoeConfig(
        vocab_size=ModelConfig.from_folder(tiny).vocab_size,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=512,  # four ranks' columns are one group of int4 each
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,  # four ranks have each head twice
        head_dim=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=window,
    )
    with torch.inference_mode():
        random_reference(config).save_pretrained(folder)
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture, and two adapters of each of the two models."""
    folder = write_mixture_with_words(tmp_path_factory.mktemp("kinds"))
    for seed in (1, 2):
        write_tiny_adapter(folder / "adapters" / str(seed), seed)
        write_adapter_of_experts(folder / "expert-adapters" / str(seed), seed)
    return folder


def write_adapter_of_experts(folder: Path, seed: int) -> Path:
    """For the mixture's experts and attention."""
    modules = {"self_attn.q_proj": (128, 512), "self_attn.o_proj": (512, 128)}
    for expert in range(NUM_EXPERTS):
        modules |= {f"mlp.experts.{expert}.{name}_proj": (128, 512) for name in ("gate", "up")}
        modules[f"mlp.experts.{expert}.down_proj"] = 512, 128
    return write_adapter(folder, 2, modules, seed)


async def answered(folder: Path, kind: str, **args: Any) -> list[RequestOutput]:
    """All asked at once; then one again, and again from the cache."""
    loras: list[LoRARequest | None] = [None]
    if "enable_lora" in KINDS[kind]:
        loras += [LoRARequest(name, lora_path=folder / kind / name) for name in ("1", "2")]
    model = "tiny" if kind in ("dense", "adapters") else str(folder)
    async with AsyncLLMEngine(model, **SMALL | KINDS[kind] | args) as engine:
        asks = [
            engine.generate(*ask, lora_request=lora)
            for ask, lora in zip(ASKS, cycle(loras), strict=False)
        ]
        outputs = list(await asyncio.gather(*asks))
        stats, is_swapped = engine.stats(), args["preemption_mode"] == "swap"
        assert stats.num_preemptions_swap if is_swapped else stats.num_preemptions_recompute
        outputs += [await engine.generate(*ASKS[1]) for _ in range(2)]
        assert outputs[-1].num_cached_tokens
        engine.check_idle()
        engine.check_integrity()
    assert not followers()
    return outputs


@cache
def of_one_rank(folder: Path, kind: str, regime: str) -> list[RequestOutput]:
    return run(answered(folder, kind, **REGIMES[regime]))


@pytest.mark.parametrize(("kind", "way", "regime"), CASES)
def test_answers_of_one_rank(folder: Path, kind: str, way: str, regime: str) -> None:
    ours = run(answered(folder, kind, **REGIMES[regime] | WAYS[way]))
    expect_same(ours, of_one_rank(folder, kind, regime))


def test_adapters_change_the_answers(folder: Path) -> None:
    """Else the cells above would show nothing."""
    for kind, base in (("adapters", "dense"), ("expert-adapters", "mixture")):
        ours, plain = (of_one_rank(folder, each, "ahead-swap") for each in (kind, base))
        pairs = zip(ours[:4], plain[:4], strict=True)
        changed = [one.outputs[0].token_ids != other.outputs[0].token_ids for one, other in pairs]
        assert changed == [False, True, True, False]
