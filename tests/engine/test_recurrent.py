"""Recurrent layers: what the engine gives is what transformers' `generate` gives of one prompt at a
time, whatever becomes of a sequence's state: chunks, neighbours, snapshots, forks, swaps.

Pure Mamba 2, and hybrids of each recurrence with attention. Other classes are in
scripts/model_matrix.py.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.commands import doctor
from asyncllm.config import EngineArgs
from asyncllm.graphs.mixed_graphs import MixedGraphs
from asyncllm.step_plan import StepKind, StepShape
from asyncllm.worker import step_captures, worker
from tests.engine.test_against_transformers import LOGPROB_TOLERANCE, REGIMES
from tests.script_module import import_script
from tests.server.http_harness import COMPLETIONS, Server, run, serving
from tests.worker.recorded_graph import ForgetfulPool

SCRIPTS = Path(__file__).parents[2] / "scripts"
matrix = import_script(SCRIPTS / "model_matrix.py")
recurrent = import_script(SCRIPTS / "recurrent_configs.py")
NUM_TOKENS = matrix.NUM_TOKENS
MODELS = {
    "mamba2": "Mamba2ForCausalLM",
    "scan": "GraniteMoeHybridForCausalLM",
    "delta": "Qwen3NextForCausalLM",
    "conv": "Lfm2ForCausalLM",
}
ALWAYS = {"skip_tokenizer_init": True, "max_model_len": 60}


class Reference:
    """A random checkpoint, and what transformers makes of it."""

    def __init__(self, architecture: str, folder: Path) -> None:
        self.folder = folder
        config_class = getattr(transformers, architecture).config_class
        config = config_class(**recurrent.RECURRENT[architecture])
        self.prompts: list[list[int]] = matrix.make_prompts()
        with torch.inference_mode():
            self.model = matrix.random_model(config, architecture)
            self.model.save_pretrained(folder)
            answers = [matrix.answer(self.model, prompt) for prompt in self.prompts]
        self.tokens = [tokens for tokens, _ in answers]
        self.logprobs = [
            [row[token].item() for token, row in zip(tokens, rows, strict=True)]
            for tokens, rows in answers
        ]

    def check(self, outputs: list[RequestOutput], numbers: list[int]) -> None:
        """Outputs of these prompts."""
        for output, number in zip(outputs, numbers, strict=True):
            completion = output.outputs[0]
            assert completion.token_ids == self.tokens[number] and completion.logprobs is not None
            entries = zip(completion.logprobs, completion.token_ids, strict=True)
            ours = [entry[token].logprob for entry, token in entries]
            assert ours == pytest.approx(self.logprobs[number], abs=LOGPROB_TOLERANCE)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    return cache(lambda name: Reference(MODELS[name], tmp_path_factory.mktemp(name)))


def params(**others: Any) -> SamplingParams:
    fixed = {"temperature": 0, "max_tokens": NUM_TOKENS, "logprobs": 0, "ignore_eos": True}
    return SamplingParams(**fixed | {"detokenize": False} | others)


async def generate(engine: AsyncLLMEngine, prompts: list[list[int]]) -> list[RequestOutput]:
    calls = (engine.generate({"prompt_token_ids": p}, params()) for p in prompts)
    return list(await asyncio.gather(*calls))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_equal(name: str, regime: str, reference: Any) -> None:
    expected: Reference = reference(name)

    async def test() -> None:
        settings = REGIMES[regime] | ALWAYS
        if "preemption_mode" in settings:  # of 12 tokens each not all seven fit
            settings["num_gpu_blocks_override"] = 20
        async with AsyncLLMEngine(str(expected.folder), **settings) as engine:
            outputs = await generate(engine, expected.prompts)
            expected.check(outputs, [*range(7)])
            again = await generate(engine, [expected.prompts[3]])
            expected.check(again, [3])
            engine.check_idle()
            stats = engine.stats()
        if "swap" in regime:
            assert stats.num_preemptions_swap > 0
        if "recompute" in regime:
            assert stats.num_preemptions_recompute > 0
        if regime == "no-prefix-cache":
            assert stats.prefix_cache_hits == 0
        elif regime in ("batched", "chunked"):
            assert again[0].num_cached_tokens == 36  # of 39: whole blocks of 4

    asyncio.run(test())


@pytest.mark.parametrize("regime", ["batched", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_steps(
    name: str, regime: str, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside decodes in pieces, between which recurrences are launched; graphs are
    recordings (tests/worker/recorded_graph.py)."""
    monkeypatch.setattr(TorchAttention, "supports_graphs", True)
    monkeypatch.setattr(step_captures, "GraphPool", ForgetfulPool)
    monkeypatch.setattr(worker, "capture_obstacle", lambda *_: None)
    replayed: list[StepShape] = []
    replay = MixedGraphs.replay

    def counted(self: MixedGraphs, shape: StepShape, *args: Any) -> None:
        replayed.append(shape)
        replay(self, shape, *args)

    monkeypatch.setattr(MixedGraphs, "replay", counted)
    expected: Reference = reference(name)

    async def test() -> None:
        sizes = [4, 7] if regime == "chunked" else [16, 128]
        captured = {"prefill_graph_sizes": sizes, "cuda_graph_sizes": [4]}
        settings = REGIMES[regime] | ALWAYS | captured
        async with AsyncLLMEngine(str(expected.folder), **settings) as engine:
            for _ in range(2):  # cold, and from snapshots
                expected.check(await generate(engine, expected.prompts), [*range(7)])
            engine.check_idle()

    asyncio.run(test())
    kind = StepKind.MIXED if regime == "chunked" else StepKind.PREFILL
    assert kind in {shape.kind for shape in replayed}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "delta"])
def test_a_shared_beginning_is_found_from_the_third_prompt_on(name: str, reference: Any) -> None:
    """The second shows where they part; its step keeps the state there."""
    expected: Reference = reference(name)

    async def test() -> None:
        settings = REGIMES["batched"] | ALWAYS
        async with AsyncLLMEngine(str(expected.folder), **settings) as engine:
            cached = []
            for number in (3, 2, 1):
                outputs = await generate(engine, [expected.prompts[number]])
                expected.check(outputs, [number])
                cached.append(outputs[0].num_cached_tokens)
            assert cached == [0, 0, 16]  # 17 tokens are shared

    asyncio.run(test())


@pytest.mark.parametrize("regime", ["batched", "synchronous", "chunked", "no-prefix-cache"])
@pytest.mark.parametrize("name", MODELS)
def test_a_second_turn_goes_on_from_the_first_ones_answer(
    name: str, regime: str, reference: Any
) -> None:
    """Each turn's prompt is all that was said before it, and more; so is transformers'."""
    expected: Reference = reference(name)
    prompt, answers = expected.prompts[2], [expected.tokens[2]]
    later = [*prompt, *answers[0], 5, 7]
    with torch.inference_mode():
        answers.append(matrix.answer(expected.model, later)[0])

    async def test() -> None:
        settings = REGIMES[regime] | ALWAYS
        async with AsyncLLMEngine(str(expected.folder), **settings) as engine:
            neighbours = asyncio.create_task(generate(engine, [expected.prompts[3]]))
            first, second = [(await generate(engine, [turn]))[0] for turn in (prompt, later)]
            assert [turn.outputs[0].token_ids for turn in (first, second)] == answers
            # Snapshots of an answer are 4 blocks of 4 tokens apart; its prompt's is after 24.
            assert second.num_cached_tokens == (0 if regime == "no-prefix-cache" else 32)
            expected.check(await neighbours, [3])
            engine.check_idle()

    assert len(prompt) == 25 and len(later) == 39
    asyncio.run(test())


@pytest.mark.parametrize("name", ["mamba2", "scan"])
def test_siblings_go_on_from_their_prompts_state(name: str, reference: Any) -> None:
    expected: Reference = reference(name)

    async def test() -> None:
        settings = REGIMES["batched"] | ALWAYS
        async with AsyncLLMEngine(str(expected.folder), **settings) as engine:
            prompt = {"prompt_token_ids": expected.prompts[2]}
            output = await engine.generate(prompt, params(n=3))
            assert [c.token_ids for c in output.outputs] == [expected.tokens[2]] * 3
            engine.check_idle()

    asyncio.run(test())


def test_over_http(reference: Any) -> None:
    expected: Reference = reference("mamba2")

    async def test() -> None:
        # Text means nothing here; ids of the model are ids of this tokenizer.
        settings = REGIMES["batched"] | {"tokenizer": "tiny", "max_model_len": 60}
        async with AsyncLLMEngine(str(expected.folder), **settings) as engine:
            server: Server
            async with serving(engine) as server:
                body = {
                    "prompt": expected.prompts[3], "max_tokens": NUM_TOKENS, "temperature": 0,
                    "ignore_eos": True, "return_token_ids": True,
                }  # fmt: skip
                for _ in range(2):
                    status, answer = await server.post(COMPLETIONS, body)
                    assert status == 200, answer
                    assert answer["choices"][0]["token_ids"] == expected.tokens[3]

    run(test())


def test_doctor_counts_states(reference: Any) -> None:
    """Three layers, each a window of 3 of 96 channels, and 8 heads of 8 times 16, in float32."""
    expected: Reference = reference("mamba2")
    args = EngineArgs(str(expected.folder), max_num_seqs=4, **ALWAYS)
    found = {finding.name: finding for finding in doctor.examine_model(args)}
    row_bytes = 3 * (3 * 128 + 8 * 8 * 16) * 4
    text = found["state per sequence"].value
    assert text.startswith(f"{row_bytes} bytes, for 5 slots, 8 snapshots")
    assert found["kv per token"].value.startswith("0 bytes")
    assert found["tokens that fit"].state == "ok"
