"""Answers with adapters equal those of peft's merged models, in batches of several and of none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, LoRARequest, SamplingParams
from tests.engine.lora_adapters import ALL, write_adapter, write_base
from tests.engine.test_against_transformers import (
    LOGPROB_TOLERANCE,
    NUM_TOKENS,
    REGIMES,
    Answer,
    greedy,
    make_prompts,
)
from tests.models.tiny_checkpoints import CONFIGS

NAMES = (None, "one", "two")
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"r": 4, "lora_alpha": 8},
    "two": {
        "r": 8,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {r"model\.layers\.1\.mlp\.down_proj": 16},
        "layers_to_transform": [0, 1],
    },
}


class Adapted:
    """A random model, its adapters, and transformers' answers: prompt i is for NAMES[i % 3]."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder / "base"
        base = write_base(CONFIGS[name], self.folder)
        models: dict[str | None, Any] = {None: base}
        self.requests: dict[str | None, LoRARequest | None] = {None: None}
        for seed, (adapter, settings) in enumerate(SETTINGS.items()):
            path = folder / adapter
            models[adapter] = write_adapter(CONFIGS[name], path, seed, **settings)
            self.requests[adapter] = LoRARequest(adapter, seed + 1, path)
        prompts = make_prompts(long=False)
        self.asked = [(prompt, NAMES[i % 3]) for i, prompt in enumerate(prompts * 3)]
        self.answers = [greedy(models[name], prompt, NUM_TOKENS) for prompt, name in self.asked]


FAMILIES = ("llama", "qwen2", "qwen3", "mistral-window", "llama-mlp-bias", "llama-tied")


@pytest.fixture(scope="module", params=FAMILIES)
def adapted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(request.param, tmp_path_factory.mktemp("adapted"))


async def ask_all(adapted: Adapted, **engine_args: Any) -> list[Answer]:
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False
    )
    args = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"} | engine_args
    async with AsyncLLMEngine(str(adapted.folder), enable_lora=True, **args) as engine:
        outputs = await asyncio.gather(
            *(
                engine.generate(prompt, params, lora_request=adapted.requests[name])
                for prompt, name in adapted.asked
            )
        )
        engine.check_idle()
        engine.check_integrity()
    answers = []
    for output in outputs:
        (completion,) = output.outputs
        ids = completion.token_ids
        logprobs = [row[i].logprob for row, i in zip(completion.logprobs, ids, strict=True)]
        answers.append((ids, logprobs))
    return answers


@pytest.mark.parametrize("regime", ["batched", "chunked", "swap", "recompute", "synchronous"])
def test_equals_the_merged_models(adapted: Adapted, regime: str) -> None:
    answers = asyncio.run(ask_all(adapted, **REGIMES[regime]))
    for (tokens, logprobs), (wanted, scores) in zip(answers, adapted.answers, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(scores, abs=LOGPROB_TOLERANCE)


def test_one_slot_for_two_adapters(adapted: Adapted) -> None:
    """They take turns, and host memory holds one at a time."""
    answers = asyncio.run(ask_all(adapted, **REGIMES["batched"], max_loras=1))
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in adapted.answers]


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("rank", [1, 7, 16, 64])
def test_each_target_alone(target: str, rank: int, tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    write_base(config, tmp_path / "base")
    model = write_adapter(config, tmp_path / "adapter", 3, r=rank, target_modules=[target])
    prompt = make_prompts(long=False)[3]

    async def ask() -> list[int]:
        engine = AsyncLLMEngine(
            str(tmp_path / "base"), skip_tokenizer_init=True, device="cpu", enable_lora=True,
            max_lora_rank=64, num_gpu_blocks_override=64,
        )  # fmt: skip
        async with engine:
            params = SamplingParams(
                temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
            )
            lora = LoRARequest("it", 1, tmp_path / "adapter")
            return (await engine.generate(prompt, params, lora_request=lora)).outputs[0].token_ids

    assert asyncio.run(ask()) == greedy(model, prompt, NUM_TOKENS)[0]
