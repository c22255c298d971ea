"""prompt_logprobs are the model's for every position, whatever cache, chunks and siblings do."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams
from tests.engine.builders import make_request, make_scheduler, run_step
from tests.models.tiny_checkpoints import CONFIGS, VOCAB_SIZE, random_reference
from tests.waiting import run

NUM_TOP = 3
PAGES: dict[str, Any] = {"num_gpu_blocks_override": 200, "block_size": 4, "swap_space": 0.001}
# Four prompts of 40 + 12 tokens need 52 pages; 22 make preemption certain.
TIGHT: dict[str, Any] = PAGES | {"num_gpu_blocks_override": 22, "max_num_seqs": 4}
REGIMES: dict[str, dict[str, Any]] = {
    "roomy": PAGES,
    "synchronous": PAGES | {"async_scheduling": False},
    "chunked": PAGES | {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "few-slots": PAGES | {"max_num_seqs": 2},
    "swap": TIGHT | {"preemption_mode": "swap"},
    "recompute": TIGHT | {"preemption_mode": "recompute"},
    "chunked-recompute": TIGHT | {"preemption_mode": "recompute", "max_num_batched_tokens": 9},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    with torch.inference_mode():
        random_reference(CONFIGS["llama"]).save_pretrained(path)
    return path


def make_prompts() -> list[list[int]]:
    """Four that share a prefix of five pages."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    return [shared + [rng.randrange(VOCAB_SIZE) for _ in range(20)] for _ in range(4)]


def check(output: RequestOutput) -> None:
    """Each position's entry against transformers', in float64 from its logits on."""
    prompt, entries = output.prompt_token_ids, output.prompt_logprobs
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    with torch.inference_mode():
        logits = random_reference(CONFIGS["llama"])(torch.tensor([prompt])).logits[0]
    expected = logits.double().log_softmax(dim=1)
    for position, (token_id, entry) in enumerate(zip(prompt, entries, strict=True)):
        if entry is None:
            continue
        row = expected[position - 1]
        top = row.topk(NUM_TOP).indices.tolist()
        assert list(entry) == [token_id, *(i for i in top if i != token_id)], position
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert logprob.rank == int((row > row[token]).sum()) + 1


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_cached_chunked_preempted_and_shared_prompts_report_the_model_s(
    regime: str, folder: Path
) -> None:
    def params(n: int) -> SamplingParams:
        return SamplingParams(n=n, seed=1, max_tokens=12, prompt_logprobs=NUM_TOP, detokenize=False)

    async def main() -> None:
        engine = AsyncLLMEngine(str(folder), skip_tokenizer_init=True, **REGIMES[regime])
        async with engine:
            prompts = make_prompts()
            n = 3
            cold = await engine.generate({"prompt_token_ids": prompts[0]}, params(n))
            check(cold)
            warm = await asyncio.gather(
                *(engine.generate({"prompt_token_ids": p}, params(n)) for p in prompts)
            )
            for output in warm:
                check(output)
            assert warm[0].outputs == cold.outputs  # neither does the cache change the answer
            stats = engine.stats()
            if "swap" in regime:
                assert stats.num_preemptions_swap > 0
            if "recompute" in regime:
                assert stats.num_preemptions_recompute > 0
            engine.check_idle()

    run(main())


def test_only_the_sequence_that_reports_computes_the_whole_prompt() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    request = make_request(1, range(10), n=2, max_tokens=1, prompt_logprobs=0)
    scheduler.add(request)
    first, second = request.sequences
    assert first.owes_prompt_logprobs and not second.owes_prompt_logprobs
    assert [(row.seq, row.start) for row in run_step(scheduler).prefills] == [(first, 0)]
    assert [(row.seq, row.start) for row in run_step(scheduler).prefills] == [(second, 8)]
    assert first.num_cached_tokens == 0
    scheduler.check_empty()


def test_what_it_computes_is_found_by_others() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(1, range(10), max_tokens=1, prompt_logprobs=0))
    run_step(scheduler)
    scheduler.add(make_request(2, range(10)))
    (row,) = run_step(scheduler).prefills
    assert row.start == 8


def test_computed_again_after_a_preemption_it_reads_the_cache() -> None:
    """With its first token it has reported; pages that are still there need no second pass."""
    scheduler = make_scheduler(num_pages=6, preemption_mode="recompute")
    older = make_request(1, range(8), max_tokens=9)
    younger = make_request(2, range(50, 58), max_tokens=9, prompt_logprobs=0)
    scheduler.add(older)
    scheduler.add(younger)
    (seq,) = younger.sequences
    run_step(scheduler)
    while not younger.metrics.num_preemptions:
        run_step(scheduler)
    assert not seq.owes_prompt_logprobs
    while not older.finished:
        run_step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    starts = [row.start for row in plan.prefills if row.seq is seq]
    assert starts and starts[0] > 0
