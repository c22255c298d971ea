"""Requests, block managers and schedulers for tests, with little to say about each."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from asyncllm.cache_group import CacheGroup
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.scheduler import Scheduler
from asyncllm.outputs import RequestMetrics
from asyncllm.sampling_params import SamplingParams
from asyncllm.step_plan import StepPlan
from asyncllm.types import Request, Sequence, StepResult, TokenUpdate


def make_request(
    number: int,
    prompt: SequenceOf[int],
    *,
    max_tokens: int = 16,
    priority: int = 0,
    eos_token_ids: SequenceOf[int] = (),
    bad_words_ids: tuple[tuple[int, ...], ...] = (),
    cache_key: bytes = b"",
    **params: Any,
) -> Request:
    """Request `r<number>`, its sequences numbered and seeded from 100 * `number`.

    `params` are fields of `SamplingParams`.
    """
    sampling_params = SamplingParams(max_tokens=max_tokens, **params)
    request = Request(
        request_id=f"r{number}",
        prompt=None,
        prompt_token_ids=list(prompt),
        sampling_params=sampling_params,
        max_tokens=max_tokens,
        stop_token_ids=frozenset([*eos_token_ids, *(sampling_params.stop_token_ids or ())]),
        metrics=RequestMetrics(arrival_time=0.0),
        priority=priority,
        bad_words_ids=bad_words_ids,
        cache_key=cache_key,
    )
    for index in range(sampling_params.n):
        seq_id = 100 * number + index
        request.sequences.append(Sequence(seq_id, request, index, seq_id, list(prompt)))
    return request


def make_sequence(number: int, prompt: SequenceOf[int], *, cache_key: bytes = b"") -> Sequence:
    return make_request(number, prompt, cache_key=cache_key).sequences[0]


def pages_of(blocks: BlockManager, seq: Sequence) -> list[int]:
    """Where there is one cache group."""
    (pages,) = blocks.pages_of(seq)
    return pages


def make_scheduler(
    num_pages: int = 100,
    block_size: int = 4,
    num_host_pages: int = 0,
    *,
    enable_prefix_caching: bool = True,
    windows: tuple[int | None, ...] = (None,),
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 100,
    **options: Any,
) -> Scheduler:
    groups = [CacheGroup(block_size, window, max_num_batched_tokens) for window in windows]
    return Scheduler(
        BlockManager(num_pages, block_size, num_host_pages, enable_prefix_caching, groups),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **options,
    )


def finish(scheduler: Scheduler, plan: StepPlan | None, token_id: int = 7) -> list[TokenUpdate]:
    """The step is done, and everyone got the same token."""
    assert plan is not None
    updates = scheduler.finish_step(plan, StepResult([token_id] * len(plan.sampled)))
    scheduler.check_integrity()
    return updates


def run_step(scheduler: Scheduler, token_id: int = 7) -> StepPlan:
    """Plan and finish one step, synchronously."""
    plan = scheduler.plan()
    finish(scheduler, plan, token_id)
    assert plan is not None
    return plan


def scheduled_requests(scheduler: Scheduler) -> dict[str, Request]:
    """By their ids, oldest first; a copy."""
    return dict(scheduler._requests)
