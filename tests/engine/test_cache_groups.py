"""Windows give back the pages behind them, and nothing that comes after changes."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import LLM, SamplingParams
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.cache_group import CacheGroup, num_blocks_that_fit, num_pages_for
from asyncllm.config import EngineArgs
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.non_finite import _evict
from asyncllm.engine.scheduler import Scheduler
from asyncllm.models.registry import model_without_memory, settle
from tests.engine.builders import finish, make_request, make_scheduler, make_sequence, run_step
from tests.engine.fake_device import seen_from
from tests.models.tiny_checkpoints import CONFIGS, VOCAB_SIZE, random_reference

SIZE = 4  # tokens per page


def test_blocks_of_a_window_by_counting() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        block_size, window, step = rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, 30)
        group = CacheGroup(block_size, window, step)
        computed, num_new = rng.randint(0, 200), rng.randint(1, step)
        first, end = group.first_block(computed), -(-(computed + num_new) // block_size)
        assert first == seen_from(window, computed) // block_size
        assert group.end(first, end) == end, "room for every step"
        assert group.end(first, 1000) - first <= -(-(window + step - 1) // block_size) + 1


def test_layers_that_see_all_tokens_keep_every_block() -> None:
    group = CacheGroup(SIZE, None, 7)
    assert (group.first_block(10**6), group.end(0, 10**6)) == (0, 10**6)
    assert group.max_blocks == sys.maxsize


def test_the_longest_sequence_that_fits() -> None:
    groups = [CacheGroup(SIZE, None), CacheGroup(SIZE, 9, 4)]
    assert [num_pages_for(groups, n) for n in (0, 1, 3, 4, 5, 9)] == [0, 2, 6, 8, 9, 13]
    for num_pages in range(30):
        fits = num_blocks_that_fit(groups, num_pages, 20)
        assert num_pages_for(groups, fits) <= num_pages
        assert fits == 20 or num_pages_for(groups, fits + 1) > num_pages


def used_by_groups(scheduler: Scheduler) -> list[int]:
    """Pages of all that runs, by group."""
    tables = [scheduler.blocks.pages_of(seq) for seq in scheduler.running.seqs]
    return [sum(page != 0 for table in tables for page in table[g]) for g in range(len(tables[0]))]


@pytest.mark.parametrize("window", [1, 3, 8, 33])
@pytest.mark.parametrize("budget", [5, 64])
def test_a_long_request_holds_its_window_and_the_largest_step(window: int, budget: int) -> None:
    scheduler = make_scheduler(
        400, SIZE, windows=(None, window), max_num_seqs=1, max_num_batched_tokens=budget
    )
    scheduler.add(make_request(1, range(900), max_tokens=100))
    most, decoding = 0, 0
    while scheduler.num_requests:
        plan = scheduler.plan()
        assert plan is not None
        full, held = used_by_groups(scheduler)
        assert full == 225 + max(0, -(-(plan.decodes.positions.max(initial=0) - 899) // SIZE))
        most = max(most, held)
        if plan.decodes and plan.decodes.positions[0] > 900 + SIZE:
            decoding = max(decoding, held)
        finish(scheduler, plan)
    assert most <= -(-(window - 1 + budget) // SIZE) + 1
    assert 1 <= decoding <= -(-(window - 1) // SIZE) + 1
    assert scheduler.stats().num_preemptions_recompute == 0
    scheduler.check_empty()


def publish_and_forget(blocks: BlockManager, num_tokens: int) -> None:
    """A prompt of so many tokens is computed in one step, and its sequence is over."""
    seq = make_sequence(1, range(num_tokens))
    assert blocks.admit(seq) is not None
    seq.num_computed = seq.num_prefill = num_tokens
    blocks.publish(seq)
    blocks.forget(seq)


def test_a_hit_needs_the_last_window_alone() -> None:
    groups = [CacheGroup(SIZE, None, 100), CacheGroup(SIZE, 6, 100)]
    blocks = BlockManager(40, SIZE, groups=groups)
    publish_and_forget(blocks, 40)
    pages = blocks.device._page_of
    in_window = [name for name in pages if len(name) > 16]
    assert len(pages) == 20 and len(in_window) == 10
    for name in in_window[:7]:  # as if they had been taken: blocks 7, 8 and 9 are left
        del blocks.device._hash_of[pages.pop(name)]
    seq = make_sequence(2, range(50))
    assert blocks.prefixes.match(seq) == 10
    assert blocks.admit(seq, 10) == []
    full, behind = blocks.pages_of(seq)
    assert 0 not in full and behind[:8] == [0] * 8 and 0 not in behind[8:], "tokens 35 to 39"
    blocks.check_integrity()
    # After 8 blocks the window reaches into block 6; after none it needs nothing.
    assert blocks.prefixes.match(make_sequence(3, range(35))) == 0


def test_a_shared_page_behind_a_window_stays_with_who_sees_it() -> None:
    blocks = BlockManager(40, SIZE, groups=[CacheGroup(SIZE, 6, 100)])
    publish_and_forget(blocks, 12)
    first, second = make_sequence(2, range(13)), make_sequence(3, range(13))
    for seq in (first, second):
        assert blocks.prefixes.match(seq) == 3 and blocks.admit(seq, 3) == []
        seq.num_computed = 12
    first.num_computed = 20
    used = blocks.device.num_used
    assert [append.block_id for append in blocks.trim(first)] == [0, 0]
    assert blocks.pages_of(second)[0][1:3] != [0, 0] and blocks.device.num_used == used
    blocks.check_integrity()


def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is given back before its sequence ends."""
    monkeypatch.setattr(CacheGroup, "first_block", lambda self, num_computed: 0)
    monkeypatch.setattr(CacheGroup, "max_blocks", sys.maxsize)


def answers(folder: Path, **args: Any) -> tuple[list[list[int]], list[float], Any]:
    """To a short prompt and some with a common beginning, and to the last again."""
    rng = random.Random(3)
    start = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    prompts = [start + [rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 9, 18)]
    prompts.insert(0, [5, 6])
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0, detokenize=False)
    sizes: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 3}
    with LLM(str(folder), skip_tokenizer_init=True, **sizes | args) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        outputs += llm.generate({"prompt_token_ids": prompts[3]}, params, use_tqdm=False)
        llm.engine.check_idle()
        stats = llm.engine.stats()
    answers = [output.outputs[0] for output in outputs]
    logprobs = [
        entry[token].logprob
        for answer in answers
        for token, entry in zip(answer.token_ids, answer.logprobs or [], strict=True)
    ]
    return [answer.token_ids for answer in answers], logprobs, stats


@pytest.mark.parametrize(("name", "few_pages"), [("mistral-window", 6), ("qwen2-layer-types", 26)])
def test_freed_is_never_freed_cached_is_cold_swapped_is_never_preempted(
    name: str, few_pages: int, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    many = {"num_gpu_blocks_override": 300, "swap_space": 0.001}
    with pytest.MonkeyPatch.context() as patch:
        lasting(patch)
        tokens, logprobs, _ = answers(tmp_path, enable_prefix_caching=False, **many)
    freed = answers(tmp_path, enable_prefix_caching=False, **many)
    cached = answers(tmp_path, **many)
    few = {"num_gpu_blocks_override": few_pages, "max_model_len": 60, "preemption_mode": "swap"}
    swapped = answers(tmp_path, **many | few)
    for found, found_logprobs, _ in (freed, cached, swapped):
        assert found == tokens
        assert found_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert freed[2].prefix_cache_hits == 0 < cached[2].prefix_cache_hits
    assert swapped[2].num_preemptions_swap > 0


def test_pages_of_deepseek_have_the_latents_size(tmp_path: Path) -> None:
    """Where torch attends; else the keys and values of all heads."""
    with torch.inference_mode():
        random_reference(CONFIGS["deepseek-v3"]).save_pretrained(tmp_path)
    config = EngineArgs(
        str(tmp_path), skip_tokenizer_init=True, device="cpu"
    ).create_engine_config()
    _, model = settle(config)
    made = model_without_memory(config.model, torch.float32, 64)
    sizes = [
        CacheLayout(each.attention_layers, 16, torch.float32).page_bytes for each in (model, made)
    ]
    hf = config.model.hf_config
    assert sizes[0] == 3 * 16 * (hf.kv_lora_rank + hf.qk_rope_head_dim) * 4
    head_dim = hf.qk_nope_head_dim + hf.qk_rope_head_dim
    assert sizes[1] == 3 * 16 * 2 * hf.num_attention_heads * head_dim * 4


def test_all_free_pages_are_zeroed_where_a_window_may_have_left_some_behind() -> None:
    scheduler = make_scheduler(30, SIZE, windows=(None, 5), max_num_batched_tokens=8)
    request = make_request(1, range(40), max_tokens=9)
    scheduler.add(request)
    for _ in range(4):
        run_step(scheduler)
    assert 0 in scheduler.blocks.pages_of(request.sequences[0])[1]
    assert sorted(_evict(scheduler, [request])) == list(range(1, 31))
