"""Random beam searches beside random answers, with too few pages: the beams of a search that runs
alone, and no page, slot or id left of any of them, however they end.

The engine is whole; only the checkpoint is small and random.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from tests.models.tiny_checkpoints import CONFIGS, VOCAB_SIZE, random_reference
from tests.waiting import PATIENCE_SECONDS

NUM_SEARCHES = 12
MAX_TOKENS = 12
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 400, "block_size": 4, "swap_space": 0.001}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llama")
    with torch.inference_mode():
        random_reference(CONFIGS["llama"]).save_pretrained(folder)
    return folder


class RandomSearches:
    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        shared = [rng.randrange(VOCAB_SIZE) for _ in range(9)]
        self.prompts = [
            shared[: rng.randint(0, 9)]
            + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
            for _ in range(NUM_SEARCHES)
        ]
        self.params = [self._random_params() for _ in range(NUM_SEARCHES)]
        self.regime = ROOMY | {
            "num_gpu_blocks_override": rng.choice([9, 12, 20, 400]),
            "max_num_seqs": rng.choice([1, 2, 4, 9]),
            "max_num_batched_tokens": rng.choice([9, 40]),
            "enable_prefix_caching": rng.random() < 0.8,
            "async_scheduling": rng.random() < 0.7,
            "preemption_mode": rng.choice(["swap", "recompute"]),
            "max_model_len": 32,
        }

    def _random_params(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            n=rng.choice([1, 2, 3, 6]),
            max_tokens=rng.randint(1, MAX_TOKENS),
            use_beam_search=True,
            length_penalty=rng.choice([1.0, 0.0, 2.0]),
            early_stopping=rng.choice([False, True, "never"]),
            stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 3, 30])),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            detokenize=False,
        )

    async def run(self, engine: AsyncLLMEngine, index: int) -> RequestOutput:
        output = await engine.generate(self.prompts[index], self.params[index], f"s{index}")
        assert output.finished and len(output.outputs) == self.params[index].n
        return output

    async def run_together(self, engine: AsyncLLMEngine) -> list[RequestOutput | BaseException]:
        """All at random moments, beside answers that grow; some are aborted, some cancelled."""
        growing = replace(SamplingParams(), max_tokens=14, temperature=0, detokenize=False)
        others = [asyncio.ensure_future(engine.generate(p, growing)) for p in self.prompts[:3]]
        tasks: list[asyncio.Task[RequestOutput]] = []
        for index in range(NUM_SEARCHES):
            tasks.append(asyncio.create_task(self.run(engine, index)))
            for _ in range(self.rng.randint(0, 60)):
                await asyncio.sleep(0)
            engine.check_integrity()
            if self.rng.random() < 0.15:
                engine.abort(f"s{self.rng.randint(0, index)}")
            if self.rng.random() < 0.1:
                self.rng.choice(tasks).cancel()
        await asyncio.gather(*others)
        return await asyncio.gather(*tasks, return_exceptions=True)


def beams_of(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [
        (beam.index, beam.token_ids, beam.finish_reason, beam.stop_reason, beam.logprobs is None)
        for beam in output.outputs
    ]


@pytest.mark.parametrize("seed", range(6))
def test_random_searches(seed: int, folder: Path) -> None:
    async def main() -> tuple[int, int]:
        searches = RandomSearches(seed)
        async with AsyncLLMEngine(str(folder), skip_tokenizer_init=True, **ROOMY) as engine:
            alone = [await searches.run(engine, index) for index in range(NUM_SEARCHES)]
            engine.check_idle()
        num_whole = num_ended_early = 0
        async with AsyncLLMEngine(
            str(folder), skip_tokenizer_init=True, **searches.regime
        ) as engine:
            for output, expected in zip(await searches.run_together(engine), alone, strict=True):
                if isinstance(output, BaseException):
                    assert isinstance(output, asyncio.CancelledError)
                elif output.outputs[0].finish_reason != "abort":
                    assert beams_of(output) == beams_of(expected)
                    assert (output.prompt_logprobs is None) == (expected.prompt_logprobs is None)
                    num_whole += 1
                    continue
                num_ended_early += 1
            engine.check_idle()
            assert engine.stats().num_used_pages == 0 and engine.stats().num_used_host_pages == 0
        return num_whole, num_ended_early

    async def in_time() -> tuple[int, int]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await main()

    num_whole, num_ended_early = asyncio.run(in_time())
    assert num_whole and num_ended_early
