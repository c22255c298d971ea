"""transformers' own model code in captured steps: as eager, as by torch's attention, as native."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import LLM, RequestOutput, SamplingParams
from tests.script_module import import_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPTS = Path(__file__).parents[2] / "scripts"
matrix = import_script(SCRIPTS / "model_matrix.py")
configs = import_script(SCRIPTS / "tiny_configs.py")
ARGS: dict[str, Any] = {
    "num_gpu_blocks_override": 400, "max_num_seqs": 16, "max_num_batched_tokens": 64,
    "swap_space": 0, "dtype": "bfloat16", "model_impl": "transformers",
    "prefill_graph_sizes": [16, 64], "cuda_graph_sizes": [1, 4, 16],
}  # fmt: skip
PARAMS = SamplingParams(
    temperature=0, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
)
LOGPROB_TOLERANCE = 0.15  # bf16, other kernels and numbers of rows
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"head_dim": 64}),
    ("LlamaForCausalLM", {}),  # heads of 8, padded
    ("Qwen3ForCausalLM", {"head_dim": 128}),  # norms of heads
    ("Gemma2ForCausalLM", {"head_dim": 128}),  # soft caps, windows
    ("GptOssForCausalLM", {"head_dim": 64}),  # sinks, windows, experts
    ("Qwen3MoeForCausalLM", {"head_dim": 64}),
    ("Phi3ForCausalLM", {}),  # merged projections
    ("DeepseekV3ForCausalLM", {}),  # V is smaller than K
    ("Mamba2ForCausalLM", {}),
    ("Lfm2ForCausalLM", {}),  # convolutions
    ("GraniteMoeHybridForCausalLM", {}),  # scans
    ("Qwen3NextForCausalLM", {}),  # delta rules
    ("Qwen3_5ForCausalLM", {}),  # the same without experts: heads of queries between their gates
]
ROUTED = (
    "GptOssForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM",
    "GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip
RECURRENT = ("Mamba2ForCausalLM", "Lfm2ForCausalLM", "Qwen3_5ForCausalLM")


def serve(folder: Path, **changes: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    settings = ARGS | {"skip_tokenizer_init": True, "max_model_len": 60} | changes
    with LLM(str(folder), **settings) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in matrix.make_prompts()]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        outputs += llm.generate(prompts[3], PARAMS, use_tqdm=False)
        return outputs, llm.engine.startup


def check(ours: list[RequestOutput], reference: list[RequestOutput]) -> None:
    for a, b in zip(ours, reference, strict=True):
        entries = zip(
            a.prompt_token_ids, a.prompt_logprobs or [], b.prompt_logprobs or [], strict=False
        )
        pairs = [(x[t], y[t]) for t, x, y in entries if x is not None and y is not None]
        assert len(pairs) == len(a.prompt_token_ids) - 1
        one, other = a.outputs[0], b.outputs[0]
        answers = zip(
            one.token_ids, other.token_ids, one.logprobs or [], other.logprobs or [], strict=False
        )
        for token, expected, x, y in answers:
            if token != expected:  # a near tie, after which they are other texts
                assert abs(x[token].logprob - y[expected].logprob) < LOGPROB_TOLERANCE
                break
            pairs.append((x[token], y[token]))
        for x, y in pairs:
            assert abs(x.logprob - y.logprob) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(("architecture", "changes"), FAMILIES)
def test_captured_equals_eager_and_torch(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("flashinfer")
    config = configs.tiny_config(architecture, **changes)
    with torch.inference_mode():
        configs.random_model(config, architecture).save_pretrained(tmp_path)
    captured, startup = serve(tmp_path)
    assert startup["decode_graphs"] == 3, "it was not captured"
    eager, startup = serve(tmp_path, enforce_eager=True)
    assert startup["decode_graphs"] == 0
    check(captured, eager)
    # Of near ties a router in bfloat16 takes another expert, by any rounding.
    if architecture not in ROUTED:
        by_torch, _ = serve(tmp_path, attention_backend="torch")
        check(captured, by_torch)
    if architecture in RECURRENT:  # whose states no attention backend moves
        on_cpu, _ = serve(tmp_path, device="cpu")
        check(captured, on_cpu)


def test_the_native_twin_gives_the_same() -> None:
    chats = [[{"role": "user", "content": f"Count from {n} to {n + 9}."}] for n in range(12)]
    params = SamplingParams(temperature=0, max_tokens=32)
    texts = []
    for changes in ({}, {"enforce_eager": True}, {"model_impl": "asyncllm"}):
        with LLM("tiny", **ARGS | changes) as llm:
            texts.append([o.outputs[0].text for o in llm.chat(chats, params, use_tqdm=False)])
    assert texts[0] == texts[1] == texts[2]


def test_a_model_that_waits_for_the_device_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaModel.forward

    @functools.wraps(forward)
    def waits(self: Any, input_ids: torch.Tensor, **others: Any) -> Any:
        if input_ids.device.type == "cuda":
            input_ids.sum().item()
        return forward(self, input_ids, **others)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", waits)
    with LLM("tiny", **ARGS) as llm:
        assert llm.engine.startup["decode_graphs"] == 0
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=4), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
    assert "runs without graphs: " in caplog.text and "synchroniz" in caplog.text
