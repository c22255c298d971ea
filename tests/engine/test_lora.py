"""Answers with adapters equal those of peft's merged models, in batches of several and of none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, PretrainedConfig

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
from tests.models.tiny_checkpoints import CONFIGS, VOCAB_SIZE

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

    def __init__(
        self, config: PretrainedConfig, folder: Path, adapters: dict[str, dict[str, Any]] = SETTINGS
    ) -> None:
        self.folder = folder / "base"
        base = write_base(config, self.folder)
        self.has_window = getattr(config, "sliding_window", None) is not None
        models: dict[str | None, Any] = {None: base}
        self.requests: dict[str | None, LoRARequest | None] = {None: None}
        for seed, (adapter, settings) in enumerate(adapters.items()):
            path = folder / adapter
            models[adapter] = write_adapter(config, path, seed, **settings)
            self.requests[adapter] = LoRARequest(adapter, seed + 1, path)
        prompts = make_prompts(long=False)
        self.asked = [(prompt, NAMES[i % 3]) for i, prompt in enumerate(prompts * 3)]
        self.stats: Any = None  # of the last engine that was asked
        self.answers = [greedy(models[name], prompt, NUM_TOKENS) for prompt, name in self.asked]


TP, PP = "tensor_parallel_size", "pipeline_parallel_size"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral-window", "llama-mlp-bias", "llama-tied")


@pytest.fixture(scope="module", params=FAMILIES)
def adapted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(CONFIGS[request.param], tmp_path_factory.mktemp("adapted"))


async def ask_all(adapted: Adapted, **engine_args: Any) -> list[Answer]:
    """All at once, and then one prompt again for each adapter, which is cached by now."""
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
        for (prompt, name), before in zip(adapted.asked[6:9], outputs[6:9], strict=True):
            again = await engine.generate(prompt, params, lora_request=adapted.requests[name])
            assert again.outputs[0].token_ids == before.outputs[0].token_ids
        adapted.stats = engine.stats()
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
    args = REGIMES[regime]
    is_tight = regime in ("swap", "recompute")
    if adapted.has_window and is_tight:
        args = args | {"num_gpu_blocks_override": 16}
    answers = asyncio.run(ask_all(adapted, **args))
    for (tokens, logprobs), (wanted, scores) in zip(answers, adapted.answers, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(scores, abs=LOGPROB_TOLERANCE)
    # The regime did what it is named after. Pages behind a window are given back, so that there it
    # depends on when requests arrive.
    stats = adapted.stats
    if is_tight:
        assert adapted.has_window or getattr(stats, f"num_preemptions_{regime}") > 0
    else:
        assert stats.prefix_cache_hits > 0


@pytest.mark.slow
def test_one_slot_for_two_adapters(adapted: Adapted) -> None:
    """They take turns, and host memory holds one at a time."""
    answers = asyncio.run(ask_all(adapted, **REGIMES["batched"], max_loras=1))
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in adapted.answers]


EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
LINEAR = {"target_modules": "all-linear"}
ENDS = {"target_modules": [*ALL, "embed_tokens", "lm_head"]}
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "ends": ("llama", ENDS),
    "ends-scaled": ("granite", {"target_modules": ["embed_tokens", "q_proj"]}),
    "bias-all": ("qwen2", {"bias": "all"}),
    "bias-of-lora": (
        "llama-attention-bias",
        {"lora_bias": True, "bias": "all", "target_modules": ["q_proj", "v_proj", "o_proj"]},
    ),
    "packed": ("phi3", LINEAR),
    "gemma2": ("gemma2", LINEAR),
    "gemma3": ("gemma3", LINEAR),
    "olmo2": ("olmo2", LINEAR),
    "olmo3": ("olmo3", LINEAR),
    "heads-in-an-order": ("glm4", LINEAR),
    "latent": ("deepseek-v2", LINEAR),
    "latent-experts": ("deepseek-v3", LINEAR | EXPERTS),
    "parallel-layers": ("cohere", LINEAR),
    "norms-of-heads": ("cohere-head-norms", LINEAR),
    "cohere2": ("cohere2", LINEAR),
    "experts-and-dense": ("qwen3-moe-sparse", LINEAR | EXPERTS),
    "glm4-moe": ("glm4-moe", LINEAR | EXPERTS),
    "qwen2-moe": ("qwen2-moe", LINEAR | EXPERTS),
    "qwen3-moe": ("qwen3-moe", LINEAR | EXPERTS),
    "mixtral": ("mixtral", LINEAR | EXPERTS),
    "olmoe": ("olmoe", LINEAR | EXPERTS),
    "experts-transposed": ("gpt-oss", LINEAR | EXPERTS),
    "down-of-experts": (
        "qwen3-moe",
        {"target_modules": [], "target_parameters": [EXPERTS["target_parameters"][1]]},
    ),
}


@pytest.mark.parametrize("case", WIDE)
def test_every_family_and_target(case: str, tmp_path: Path) -> None:
    """Two adapters of everything, and none, in one chunked batch."""
    name, settings = WIDE[case]
    adapted = Adapted(CONFIGS[name], tmp_path, {"one": settings, "two": settings | {"r": 3}})
    answers = asyncio.run(ask_all(adapted, **REGIMES["chunked"] | {"num_gpu_blocks_override": 900}))
    for (tokens, logprobs), (wanted, scores) in zip(answers, adapted.answers, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(scores, abs=LOGPROB_TOLERANCE)


SAVED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ends": ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}, {}),
    "head-of-tied": ("llama-tied", {"modules_to_save": ["lm_head"]}, {}),
    "embedding-of-tied": ("llama-tied", {"modules_to_save": ["embed_tokens"]}, {}),
    "tied-as-they-were": (
        "llama-tied",
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "scaled": ("granite", {"modules_to_save": ["lm_head", "embed_tokens"]}, {}),
    "parts-with-biases": (
        "qwen2",
        {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["k_proj", "o_proj"]},
        {},
    ),
    "linear": (
        "llama-mlp-bias",
        {"target_modules": ["v_proj"], "modules_to_save": ["q_proj", "down_proj", "up_proj"]},
        {},
    ),
    "heads-in-an-order": (
        "glm4",
        {"target_modules": ["v_proj"], "modules_to_save": ["q_proj", "k_proj"]},
        {},
    ),
    "router": ("qwen3-moe", {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}, {}),
    "transformers": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "o_proj"]},
        {"model_impl": "transformers"},
    ),
}
DORA = {"use_dora": True}
MAGNITUDES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", DORA | {"target_modules": [*ALL, "lm_head"]}, {}),
    "dora-with-biases": ("qwen2", DORA | {"bias": "all"}, {}),
    "dora-of-heads-in-an-order": ("glm4", DORA | LINEAR, {}),
    "dora-packed": ("phi3", DORA | LINEAR, {}),
    "dora-transformers": ("llama", DORA, {"model_impl": "transformers"}),
}


@pytest.mark.parametrize("case", [*SAVED, *MAGNITUDES])
def test_whole_weights_and_magnitudes(case: str, tmp_path: Path) -> None:
    """One adapter has them, the other has none, and some rows have no adapter."""
    check_saved((SAVED | MAGNITUDES)[case], tmp_path)


def check_saved(
    case: tuple[str, dict[str, Any], dict[str, Any]], folder: Path, **engine_args: Any
) -> None:
    name, settings, args = case
    saved = {"lora_modules_to_save": settings.get("modules_to_save")}
    adapted = Adapted(CONFIGS[name], folder, {"one": settings, "two": {"r": 3}})
    regime = REGIMES["chunked"] | {"num_gpu_blocks_override": 900} | saved | args | engine_args
    answers = asyncio.run(ask_all(adapted, **regime))
    for (tokens, logprobs), (wanted, scores) in zip(answers, adapted.answers, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(scores, abs=LOGPROB_TOLERANCE)


TRANSFORMERS: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "llama": (CONFIGS["llama"], ENDS),
    "gpt2": (
        GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=32, n_layer=3, n_head=4, n_positions=64,
            bos_token_id=None, eos_token_id=None, initializer_range=0.2,
        ),
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_models_of_transformers(case: str, tmp_path: Path) -> None:
    config, settings = TRANSFORMERS[case]
    adapted = Adapted(config, tmp_path, {"one": settings, "two": settings | {"r": 3}})
    regime = REGIMES["chunked"] | {"model_impl": "transformers"}
    answers = asyncio.run(ask_all(adapted, **regime))
    for (tokens, logprobs), (wanted, scores) in zip(answers, adapted.answers, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(scores, abs=LOGPROB_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ranks"), [("ends", TP), ("bias-all", TP), ("qwen3-moe", TP), ("ends", PP)]
)
def test_two_ranks(case: str, ranks: str, tmp_path: Path) -> None:
    """Each has its rows or columns, or its layers, of every adapter."""
    name, settings = WIDE[case]
    adapted = Adapted(CONFIGS[name], tmp_path, {"one": settings, "two": settings | {"r": 3}})
    regime = REGIMES["chunked"] | {"num_gpu_blocks_override": 900, ranks: 2}
    answers = asyncio.run(ask_all(adapted, **regime))
    for (tokens, logprobs), (wanted, scores) in zip(answers, adapted.answers, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(scores, abs=LOGPROB_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ranks"),
    [("ends", TP), ("linear", TP), ("ends", PP), ("dora", PP)],
)
def test_whole_weights_on_two_ranks(case: str, ranks: str, tmp_path: Path) -> None:
    check_saved((SAVED | MAGNITUDES)[case], tmp_path, **{ranks: 2})


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
            max_lora_rank=64, num_gpu_blocks_override=64, swap_space=0,
        )  # fmt: skip
        async with engine:
            params = SamplingParams(
                temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
            )
            lora = LoRARequest("it", 1, tmp_path / "adapter")
            return (await engine.generate(prompt, params, lora_request=lora)).outputs[0].token_ids

    assert asyncio.run(ask()) == greedy(model, prompt, NUM_TOKENS)[0]
