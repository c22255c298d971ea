"""Quantised checkpoints and KV caches, served: against transformers on the dequantised weights."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from tests.models.quantized_files import FORMATS, Format, write_checkpoint
from tests.models.tiny_checkpoints import VOCAB_SIZE

NUM_TOKENS = 12
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 200, "block_size": 4, "swap_space": 0.001}
rng = random.Random(3)
PROMPTS = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 17, 30)]


async def serve(folder: Path, **args: Any) -> list[RequestOutput]:
    """Greedy answers to all prompts at once, with the log-probabilities of the prompts' tokens."""
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, logprobs=1, prompt_logprobs=1, detokenize=False
    )
    async with AsyncLLMEngine(str(folder), skip_tokenizer_init=True, **(ROOMY | args)) as engine:
        outputs = await asyncio.gather(
            *(engine.generate({"prompt_token_ids": prompt}, params) for prompt in PROMPTS)
        )
        engine.check_idle()
        return list(outputs)


def expect_answers(outputs: list[RequestOutput], reference: Any, bound: float) -> None:
    """Every token is the reference's best by more than -2 `bound`, given the tokens before it, and
    its log-probability within `bound` of the reference's; so are those of the prompt."""
    num_clear = 0
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        completion = output.outputs[0]
        answer = completion.token_ids
        assert len(answer) == NUM_TOKENS and completion.logprobs is not None
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0].float()
        expected = logits.log_softmax(1)
        assert output.prompt_logprobs is not None
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            token = prompt[position + 1]
            assert entry[token].logprob == pytest.approx(
                expected[position, token].item(), abs=bound
            )
        for step, (token, entry) in enumerate(zip(answer, completion.logprobs, strict=True)):
            row = expected[len(prompt) - 1 + step]
            assert entry[token].logprob == pytest.approx(row[token].item(), abs=bound)
            assert row[token] > row.max() - 2 * bound
            best, second = row.topk(2).values.tolist()
            num_clear += best - second > 2 * bound
    assert num_clear > len(PROMPTS) * NUM_TOKENS / 4  # else the bound says nothing of the tokens


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_answers_as_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    form: Format = FORMATS[name]
    with torch.inference_mode():
        folder, reference = write_checkpoint(form, tmp_path)
    expect_answers(asyncio.run(serve(folder)), reference, form.bound)
