"""An FP8 KV cache: the same tokens whatever the engine does, those of transformers' attention over
keys and values that were rounded likewise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.kv_cache import KVCache, KVScales
from asyncllm.config import EngineArgs
from asyncllm.errors import ModelLoadError
from asyncllm.models.kv_scales import measured_scales, stored_scales
from tests.engine.test_against_transformers import make_prompts
from tests.engine.test_quantized import expect_answers, serve
from tests.models.tiny_checkpoints import CONFIGS, CPU, WINDOW, load, random_reference

NUM_TOKENS = 14
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1, detokenize=False)
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 200, "block_size": 4, "swap_space": 0.001}
TIGHT = ROOMY | {"num_gpu_blocks_override": 28, "max_num_seqs": 7}
REGIMES: dict[str, dict[str, Any]] = {
    "synchronous": ROOMY | {"async_scheduling": False},
    "chunked": ROOMY | {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "no-prefix-cache": ROOMY | {"enable_prefix_caching": False},
    "swap": TIGHT | {"preemption_mode": "swap"},
    "recompute": TIGHT | {"preemption_mode": "recompute"},
}
BOUND = 0.02  # what lies between two numbers of the type may go to either
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    with torch.inference_mode():
        reference = random_reference(CONFIGS["llama"])
        reference.save_pretrained(folder)
    return folder, reference


async def answers(folder: Path, **args: Any) -> list[RequestOutput]:
    prompts = make_prompts(long=False)
    async with AsyncLLMEngine(str(folder), skip_tokenizer_init=True, **args) as engine:
        outputs = await asyncio.gather(
            *(engine.generate({"prompt_token_ids": prompt}, PARAMS) for prompt in prompts)
        )
        outputs.append(await engine.generate({"prompt_token_ids": prompts[3]}, PARAMS))
        engine.check_idle()
        if "preemption_mode" in args:
            stats = engine.stats()
            assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    return outputs


@contextmanager
def rounded_cache(reference: Any, dtype: torch.dtype, scales: KVScales) -> Iterator[None]:
    """transformers' model attends over keys and values as such a cache gives them."""

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **rest: Any) -> Any:
        index = module.layer_idx
        k = (k / scales.keys[index]).to(dtype).float() * scales.keys[index]
        v = (v / scales.values[index]).to(dtype).float() * scales.values[index]
        return sdpa_attention_forward(module, q, k, v, None, **rest)

    AttentionInterface.register("rounded", attend)
    reference.set_attn_implementation("rounded")
    try:
        yield
    finally:
        reference.set_attn_implementation("sdpa")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("calculate", [False, True])
def test_answers_are_those_of_rounded_keys_and_values(
    dtype: str, calculate: bool, model: tuple[Path, Any]
) -> None:
    folder, reference = model
    scales = KVScales.ones(3)
    if calculate:
        config = EngineArgs(str(folder), skip_tokenizer_init=True).create_engine_config().model
        with torch.inference_mode():
            scales = measured_scales(load(folder), config, DTYPES[dtype], WINDOW, CPU, None)
        assert min(scales.keys + scales.values) > 0 and max(scales.keys) < 0.1
    outputs = asyncio.run(serve(folder, kv_cache_dtype=dtype, calculate_kv_scales=calculate))
    with rounded_cache(reference, DTYPES[dtype], scales):
        expect_answers(outputs, reference, BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_the_same_tokens_in_every_regime(regime: str, model: tuple[Path, Any]) -> None:
    expected = asyncio.run(answers(model[0], kv_cache_dtype="fp8", **ROOMY))
    found = asyncio.run(answers(model[0], kv_cache_dtype="fp8", **REGIMES[regime]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_a_page_is_half_as_large_and_doctor_knows() -> None:
    from asyncllm.commands.doctor import examine

    def per_token(**args: Any) -> int:
        found = {finding.name: finding.value for finding in examine(EngineArgs("tiny", **args))}
        return int(found["kv per token"].split()[0])

    assert per_token(dtype="bfloat16") == 2 * per_token(dtype="bfloat16", kv_cache_dtype="fp8")


def test_what_is_stored_is_divided_by_the_scales() -> None:
    scales = KVScales([0.5], [4.0])
    layer = AttentionLayer(0, num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
    layout = CacheLayout([layer], 2, torch.float8_e4m3fn)
    cache = KVCache(layout, 3, CPU, scales=scales)
    k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    k[0, 0, 0] = 1e6  # more than the type holds
    cache.write(0, torch.tensor([3, 4]), k, v)
    read = cache.read(0, torch.tensor([1, 2]), torch.float32)
    assert read[0, 0, 1, 0, 0] == 448
    torch.testing.assert_close(read[1, 0, 0] * 0.5, k[1], rtol=0.07, atol=1e-3)
    torch.testing.assert_close(read[0, 1, 1] * 4, v[0], rtol=0.07, atol=0.02)
    cache.clear_pages([1])
    assert not cache.layers[0][1].float().any()


def with_scales(folder: Path, model: Path, tensors: dict[str, torch.Tensor]) -> Path:
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors") | tensors
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_scales_of_the_checkpoint(tmp_path: Path, model: tuple[Path, Any]) -> None:
    tensors = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.25),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor([0.5]),
        "model.layers.1.self_attn.v_proj.v_scale": torch.tensor([2.0]),
    }
    folder = with_scales(tmp_path, model[0], tensors)
    config = EngineArgs(str(folder), skip_tokenizer_init=True).create_engine_config().model
    assert stored_scales(config, range(3)) == KVScales([0.25, 0.5, 1.0], [1.0, 2.0, 1.0])
    outputs = asyncio.run(serve(folder, kv_cache_dtype="fp8"))
    with rounded_cache(model[1], torch.float8_e4m3fn, stored_scales(config, range(3))):
        expect_answers(outputs, model[1], BOUND)
    expect_answers(asyncio.run(serve(folder)), model[1], 1e-3)  # a plain cache has none


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_no_scale_is_refused(value: float, tmp_path: Path, model: tuple[Path, Any]) -> None:
    name = "model.layers.2.self_attn.v_scale"
    folder = with_scales(tmp_path, model[0], {name: torch.tensor(value)})
    with pytest.raises(ModelLoadError, match=f"{name} must be one positive number"):
        asyncio.run(serve(folder, kv_cache_dtype="fp8"))


def test_flags_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="calculate_kv_scales is for an fp8 kv_cache_dtype"):
        EngineArgs("tiny", calculate_kv_scales=True).create_engine_config()
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8"):
        EngineArgs("tiny", kv_cache_dtype="int8").create_engine_config()  # type: ignore[arg-type]
