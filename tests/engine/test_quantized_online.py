"""`--quantization`: the built-in model keeps its answers, and every model is that of the weights
which are made of it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from asyncllm import LLM, SamplingParams
from asyncllm.errors import ModelLoadError
from asyncllm.model_config import BUILTIN_MODELS, Quantization
from asyncllm.models.quantization.online import SCHEMES
from asyncllm.models.quantization.scheme import dequantize, quantize
from tests.engine.test_quantized import expect_answers, serve
from tests.models.quantized_files import FORMATS, fp8_tokens, int8_tokens, see, write_checkpoint
from tests.models.tiny_checkpoints import CONFIGS, llama, random_reference

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
tiny_text: Any = importlib.import_module("tiny_text")
tiny_tokenizer: Any = importlib.import_module("tiny_tokenizer")

OF_A_KIND = 2
MAX_TOKENS = 48
# Share of the answers that the model has right in float32; docs/log/quantization.md has more.
LEAST_KEPT: dict[Quantization, float] = {"fp8": 0.97, "int8": 0.97, "int4": 0.95}
ACTIVATIONS = {"fp8": fp8_tokens, "int8": int8_tokens, "int4": None}
BOUNDS = {"fp8": 0.15, "int8": 0.15, "int4": 2e-3}


@cache
def questions() -> list[tuple[list[int], list[int]]]:
    """Prompt and right answer, its end included."""
    tokenizer: Any = AutoTokenizer.from_pretrained(BUILTIN_MODELS["tiny"])
    found = []
    for kind in tiny_text.WEIGHTS:
        for shown in tiny_text.held_out_examples(kind, OF_A_KIND):
            prompt = tiny_tokenizer.render_prompt(tokenizer, shown)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            answer = tokenizer.encode(shown.answer, add_special_tokens=False)
            found.append((ids, [*answer, tokenizer.eos_token_id]))
    return [each for each in found if len(each[1]) <= MAX_TOKENS]


@cache
def right_answers(quantization: Quantization | None) -> set[int]:
    """Numbers of the questions whose greedy answer is right in every token."""
    torch.set_num_threads(1)
    llm = LLM(
        "tiny",
        quantization=quantization,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 28,
        swap_space=0,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in questions()],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False),
        use_tqdm=False,
    )
    return {
        number
        for number, (output, (_, answer)) in enumerate(zip(outputs, questions(), strict=True))
        if output.outputs[0].token_ids == answer
    }


@pytest.mark.slow
@pytest.mark.parametrize("quantization", LEAST_KEPT)
def test_the_built_in_model_keeps_its_answers(quantization: Quantization) -> None:
    plain = right_answers(None)
    kept = right_answers(quantization) & plain
    print(f"{quantization}: {len(kept)} of {len(plain)}, {len(questions())} asked")
    assert len(plain) > 0.8 * len(questions())
    assert len(kept) >= LEAST_KEPT[quantization] * len(plain)


@pytest.mark.parametrize("quantization", LEAST_KEPT)
def test_it_answers_as_the_weights_that_are_made(
    quantization: Quantization, tmp_path: Path
) -> None:
    config = llama(hidden_size=128, intermediate_size=256)
    with torch.inference_mode():
        reference = random_reference(config)
        reference.save_pretrained(tmp_path)
        scheme = SCHEMES[quantization]
        for name, layer in reference.named_modules():
            if name.endswith("_proj"):
                layer.weight.copy_(dequantize(scheme, *quantize(scheme, layer.weight)))
                if (activations := ACTIVATIONS[quantization]) is not None:
                    see(layer, activations)
    outputs = asyncio.run(serve(tmp_path, quantization=quantization))
    expect_answers(outputs, reference, BOUNDS[quantization])


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(llama(hidden_size=64)).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"int4: model.layers.0.*128 does not divide its 64 columns"
    ):
        LLM(str(tmp_path), quantization="int4", skip_tokenizer_init=True, swap_space=0)


@pytest.mark.parametrize("name", ["glm4", "cohere", "deepseek-v2", "phi3-partial-longrope"])
def test_what_only_transformers_code_would_serve_is_refused(name: str, tmp_path: Path) -> None:
    """It is not left in 16 bits without a word."""
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"quantization int8: .*in an order"):
        LLM(str(tmp_path), quantization="int8", skip_tokenizer_init=True, swap_space=0)


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        write_checkpoint(FORMATS["gptq"], tmp_path)
    with pytest.raises(ModelLoadError, match=r"'int8' is for checkpoints in 16 bits.*gptq"):
        LLM(str(tmp_path), quantization="int8", skip_tokenizer_init=True, swap_space=0)
