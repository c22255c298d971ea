"""Greedy tokens and logprobs equal transformers' generate, whatever the engine does with a batch.

Every family and RoPE variant, float32 on the CPU; batched, chunked, with shared prefixes, preempted
by swap and by recompute, one step ahead and synchronous.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.cache_group import num_pages_for
from asyncllm.model_config import ModelConfig
from asyncllm.models.registry import model_without_memory
from tests.models.tiny_checkpoints import CONFIGS, VOCAB_SIZE, WINDOW, random_reference

NUM_TOKENS = 18
LOGPROB_TOLERANCE = 1e-3
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 200, "block_size": 4, "swap_space": 0.001}
# Seven prompts of up to 40 + 18 tokens need about 100 pages of 4; 30 make preemption certain.
TIGHT: dict[str, Any] = ROOMY | {"num_gpu_blocks_override": 30, "max_num_seqs": 7}
REGIMES: dict[str, dict[str, Any]] = {
    "batched": ROOMY,
    "synchronous": ROOMY | {"async_scheduling": False},
    "chunked": ROOMY | {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "no-prefix-cache": ROOMY | {"enable_prefix_caching": False},
    "swap": TIGHT | {"preemption_mode": "swap"},
    "recompute": TIGHT | {"preemption_mode": "recompute"},
    "swap-synchronous": TIGHT | {"preemption_mode": "swap", "async_scheduling": False},
    "chunked-recompute": TIGHT | {"preemption_mode": "recompute", "max_num_batched_tokens": 9},
}


def make_prompts(long: bool) -> list[list[int]]:
    """Seven prompts, four of which share a prefix; `long` ones go past the RoPE window."""
    rng = random.Random(7)
    ids = lambda n: [rng.randrange(VOCAB_SIZE) for _ in range(n)]  # noqa: E731
    shared = ids(17)
    prompts = [shared + ids(n) for n in (1, 3, 8, 22)] + [ids(1), ids(5), ids(30)]
    return [*prompts, ids(WINDOW + 9)] if long else prompts


Answer = tuple[list[int], list[float]]  # tokens, their log-probabilities


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> Answer:
    """The answers of transformers' generate."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    scores = [
        score[0].log_softmax(0)[token].item()
        for score, token in zip(output.scores, tokens, strict=True)
    ]
    return tokens, scores


class Reference:
    """transformers' greedy answers, one prompt at a time, and the checkpoint they came from."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.prompts = make_prompts(long=name == "llama-dynamic")
        random_reference(CONFIGS[name]).save_pretrained(folder)
        # dynamic RoPE keeps state between calls, so each prompt gets a fresh model
        answers = [greedy(random_reference(CONFIGS[name]), p, NUM_TOKENS) for p in self.prompts]
        self.tokens = [tokens for tokens, _ in answers]
        self.logprobs = [logprobs for _, logprobs in answers]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    return cache(lambda name: Reference(name, tmp_path_factory.mktemp(name)))


def pages_for(reference: Reference, regime: dict[str, Any]) -> dict[str, Any]:
    """The regime with as many pages for each cache group. Windows give back what they take: to
    preempt them takes small steps, and no more pages than the longest sequence needs."""
    config = ModelConfig.from_folder(reference.folder)
    layers = model_without_memory(config, torch.float32, config.context_window).attention_layers
    layout = CacheLayout(layers, regime["block_size"], torch.float32)
    if "preemption_mode" in regime and layout.windows != [None]:
        regime = regime | {"max_num_batched_tokens": 9}
        longest = max(map(len, reference.prompts)) + NUM_TOKENS
        num_pages = num_pages_for(layout.groups(9), -(-longest // layout.block_size))
    else:
        num_pages = regime["num_gpu_blocks_override"] * layout.num_groups
    return regime | {"num_gpu_blocks_override": num_pages}


async def run_engine(
    reference: Reference, regime: dict[str, Any]
) -> tuple[list[RequestOutput], Any]:
    """All prompts at once, then the first again (a cached prompt); outputs and final stats."""
    regime = pages_for(reference, regime)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1, detokenize=False)
    async with AsyncLLMEngine(str(reference.folder), skip_tokenizer_init=True, **regime) as engine:
        outputs = await asyncio.gather(
            *(engine.generate({"prompt_token_ids": p}, params) for p in reference.prompts)
        )
        again = await engine.generate({"prompt_token_ids": reference.prompts[3]}, params)
        assert again.outputs[0].token_ids == reference.tokens[3]
        engine.check_idle()
        return list(outputs), engine.stats()


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logprobs_equal(name: str, regime: str, reference: Any) -> None:
    expected: Reference = reference(name)
    outputs, stats = asyncio.run(run_engine(expected, REGIMES[regime]))
    for output, tokens, logprobs in zip(outputs, expected.tokens, expected.logprobs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == tokens
        assert completion.logprobs is not None
        ours = [
            entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)
        ]
        assert ours == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)
    # The regime did what it is named after.
    if "swap" in regime:
        assert stats.num_preemptions_swap > 0
    if "recompute" in regime:
        assert stats.num_preemptions_recompute > 0
    if regime == "no-prefix-cache":
        assert stats.prefix_cache_hits == 0
    elif regime in ("batched", "chunked"):
        assert stats.prefix_cache_hits > 0
