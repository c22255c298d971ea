"""Random models of other kinds, whole engines over processes: the answers of one rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm import AsyncLLMEngine, LoRARequest, SamplingParams
from asyncllm.errors import LoRALoadError
from asyncllm.worker.logits_processors import LogitsProcessor, ProcessorRow
from tests.engine.adapter_files import write_tiny_adapter
from tests.models.quantized_files import FORMATS, write_checkpoint
from tests.models.tiny_checkpoints import CONFIGS, VOCAB_SIZE, random_reference
from tests.parallel.engines import SMALL, Ask, answers, expect_same, greedy
from tests.waiting import run

pytestmark = pytest.mark.slow
rng = random.Random(3)
ASKS = [
    Ask(
        {"prompt_token_ids": [rng.randrange(VOCAB_SIZE) for _ in range(length)]},
        greedy(14, prompt_logprobs=1, detokenize=False),
    )
    for length in (1, 5, 17, 30)
]
# With steps of 16 tokens the windows' pages are given back while requests run.
ARGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_batched_tokens": 16}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama", {"tensor_parallel_size": 4}),
        ("gemma3", {"tensor_parallel_size": 2}),
        ("gpt-oss", {"tensor_parallel_size": 2}),
        ("deepseek-v3", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 3}),
        ("qwen3-moe", {"tensor_parallel_size": 2}),
        ("qwen3-moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen3-moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("mixtral", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    ],
)
@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "synchronous"])
def test_a_random_model(name: str, ranks: dict[str, Any], is_ahead: bool, tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    args = ARGS | {"async_scheduling": is_ahead}
    expected = run(answers(tmp_path, ASKS, **args))
    expect_same(run(answers(tmp_path, ASKS, **args, **ranks)), expected)


@pytest.mark.parametrize("name", ["awq", "gptq-v2-8", "ct-fp8-block", "ct-pack-4"])
def test_a_quantised_checkpoint(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        write_checkpoint(FORMATS[name], tmp_path)
    expected = run(answers(tmp_path, ASKS, **ARGS))
    expect_same(run(answers(tmp_path, ASKS, **ARGS, tensor_parallel_size=2)), expected)


def test_quantised_while_it_is_loaded() -> None:
    asks = [Ask("Once upon a time", greedy(12))]
    expected = run(answers("tiny", asks, quantization="int4"))
    expect_same(run(answers("tiny", asks, quantization="int4", tensor_parallel_size=2)), expected)


def test_an_fp8_kv_cache() -> None:
    asks = [Ask("Once upon a time", greedy(12))]
    expected = run(answers("tiny", asks, kv_cache_dtype="fp8"))
    ours = run(answers("tiny", asks, kv_cache_dtype="fp8", tensor_parallel_size=2))
    expect_same(ours, expected)


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_adapters(ranks: str, tmp_path: Path) -> None:
    """Two, and none, in the same steps, through one slot and two."""
    folders = [write_tiny_adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    adapters = [None, *(LoRARequest(f.name, lora_path=f) for f in folders)]
    ask = Ask("Once upon a time", greedy(10))

    async def answered(**args: Any) -> list[Any]:
        async with AsyncLLMEngine("tiny", enable_lora=True, max_loras=1, **SMALL | args) as engine:
            every = (*adapters, *adapters[1:])
            return [await engine.generate(*ask, lora_request=each) for each in every]

    expected = run(answered())
    assert len({str(each.outputs[0].token_ids) for each in expected}) == 3
    expect_same(run(answered(**{ranks: 2})), expected)


def test_an_adapter_that_only_another_stage_can_refuse(tmp_path: Path) -> None:
    """Rank 0 has none of its layer; the place that it was read to is free again."""
    folder = write_tiny_adapter(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.6.mlp.down_proj.lora_B.weight"
    save_file(tensors | {name: tensors[name][1:].contiguous()}, file)

    async def test() -> None:
        args = {"enable_lora": True, "max_loras": 1, "pipeline_parallel_size": 2}
        async with AsyncLLMEngine("tiny", **SMALL | args) as engine:
            for _ in range(2):
                with pytest.raises(
                    LoRALoadError, match=r"layers.6.mlp.down_proj.lora_B.* has shape"
                ):
                    await engine.add_lora(LoRARequest("a", lora_path=folder))
            good = LoRARequest("b", lora_path=write_tiny_adapter(tmp_path / "b"))
            assert await engine.generate("Once", greedy(3), lora_request=good)

    run(test())


class Favour(LogitsProcessor):
    """Makes `extra_args["favour"]` the next token."""

    def is_needed(self, params: SamplingParams) -> bool:
        return "favour" in (params.extra_args or {})

    def update(self, added: Sequence[ProcessorRow], removed: Sequence[int]) -> None:
        """It keeps nothing of rows."""

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        for row_logits, row in zip(logits, rows, strict=True):
            row_logits[(row.params.extra_args or {})["favour"]] = 1e4
        return logits


def test_a_logits_processor_is_rank_0s() -> None:
    """Its class is never named to the others."""
    asks = [Ask("Once", greedy(6, extra_args={"favour": 300})), Ask("The dog", greedy(6))]
    args = {"logits_processors": [Favour]}
    expected = run(answers("tiny", asks, **args))
    assert set(expected[0].outputs[0].token_ids) == {300}
    expect_same(run(answers("tiny", asks, **args, tensor_parallel_size=2)), expected)
