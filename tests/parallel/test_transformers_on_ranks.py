"""Models that transformers' own code runs, on several ranks by its tensor-parallel plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from asyncllm import AsyncLLMEngine, LoRARequest
from asyncllm.errors import ModelLoadError
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.parallel.mesh import Alone
from tests.engine.adapter_files import write_tiny_adapter
from tests.models.tiny_checkpoints import CONFIGS, llama, random_reference
from tests.parallel.engines import SMALL, Ask, answers, expect_same, greedy
from tests.parallel.test_models_on_ranks import ARGS, ASKS
from tests.parallel.test_shards import build, expect_equal
from tests.parallel.test_two_ranks import ASKS as SAMPLED
from tests.script_module import import_script
from tests.waiting import run

ROOT = Path(__file__).parents[2]
tiny_configs = import_script(ROOT / "scripts" / "tiny_configs.py")
BACKEND: dict[str, Any] = {"model_impl": "transformers"}
# What each shows of a plan.
CLASSES = {
    "AriaTextForCausalLM": "experts whose weights lie inputs first",
    "CohereForCausalLM": "attention and feed-forward of one input, tied embeddings",
    "DeepseekV2ForCausalLM": "latents, shared experts",
    "GPTNeoXForCausalLM": "q, k and v in one weight, head by head; biases",
    "GraniteSWAForCausalLM": "sinks",
    "LlamaForCausalLM": "all of a layer by our kernels",
    "NemotronForCausalLM": "a feed-forward without a gate",
    "Olmo2ForCausalLM": "q and k gathered, for their norms",
    "Phi3ForCausalLM": "merged projections, gathered",
    "Qwen3MoeForCausalLM": "experts",
    "Starcoder2ForCausalLM": "biases of what is summed",
}


def write(name: str, folder: Path) -> None:
    with torch.inference_mode():
        tiny_configs.random_model(tiny_configs.tiny_config(name), name).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_two_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    expect_equal(tmp_path, 2, implementation="transformers")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-mqa", "qwen3-moe"])
def test_four_ranks_some_of_which_have_the_same_kv_head(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    if name == "qwen3-moe":  # experts of 16 in rows of 4
        expect_equal(tmp_path, 2, implementation="transformers")
    else:
        expect_equal(tmp_path, 4, implementation="transformers")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_ranks_have_all_of_the_weights_and_no_more(name: str, tmp_path: Path) -> None:
    """But for norms, routers and embeddings, which each has whole."""
    write(name, tmp_path)
    kind: Any = {"implementation": "transformers"}
    whole = {each.name: each.num_bytes for each in build(tmp_path, Alone(), **kind).loads()}
    shares: dict[str, int] = dict.fromkeys(whole, 0)
    for rank in range(2):
        for load in build(tmp_path, Alone(MeshConfig(2, rank)), **kind).loads():
            shares[load.name] += load.num_bytes
    for tensor, num_bytes in shares.items():
        is_whole = "norm" in tensor or "mlp.gate.weight" in tensor or "embed" in tensor
        is_whole |= "lm_head" in tensor  # of 97 tokens
        assert num_bytes == whole[tensor] * (2 if is_whole else 1), tensor


@pytest.mark.slow
@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "synchronous"])
def test_engines_of_one_and_two_ranks(is_ahead: bool) -> None:
    args = BACKEND | {"async_scheduling": is_ahead, "chunked_prefill_size": 5}
    expected = run(answers("tiny", SAMPLED, **args))
    expect_same(run(answers("tiny", SAMPLED, **args, tensor_parallel_size=2)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CohereForCausalLM", "Qwen3NextForCausalLM"])
def test_a_class_that_is_transformers_alone(name: str, tmp_path: Path) -> None:
    """The latter's recurrences are whole on each rank."""
    write(name, tmp_path)
    expected = run(answers(tmp_path, ASKS, **ARGS))
    expect_same(run(answers(tmp_path, ASKS, **ARGS, tensor_parallel_size=2)), expected)


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    """One layer divided by rows, one by columns: `q_proj` and `down_proj`."""
    folders = [write_tiny_adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    adapters = [None, *(LoRARequest(f.name, lora_path=f) for f in folders)]
    ask = Ask("Once upon a time", greedy(10))

    async def answered(**args: Any) -> list[Any]:
        args = SMALL | BACKEND | {"enable_lora": True, "max_loras": 2} | args
        async with AsyncLLMEngine("tiny", **args) as engine:
            return [await engine.generate(*ask, lora_request=each) for each in adapters]

    expected = run(answered())
    assert len({str(each.outputs[0].token_ids) for each in expected}) == 3
    expect_same(run(answered(tensor_parallel_size=2)), expected)


@pytest.mark.parametrize(
    ("config", "ranks", "complaint"),
    [
        (AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=2), {},
         "'GPT2LMHeadModel' has no tensor-parallel plan in transformers .tensor_parallel_size 2"),
        (llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48), {},
         "tensor_parallel_size 2 does not divide num_key_value_heads 3"),
        (llama(), {"pp": 2}, "pipeline_parallel_size 2: LlamaForCausalLM is run by transformers'"),
        (llama(), {"by_expert": True}, "enable_expert_parallel: LlamaForCausalLM is run by"),
    ],
)  # fmt: skip
def test_what_is_not_divided_is_refused_by_name(
    config: Any, ranks: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with torch.inference_mode():
        random_reference(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=complaint):
        build(tmp_path, Alone(MeshConfig(2, 0, **ranks)), implementation="transformers")
