"""Requests whose logits are NaN or infinite: who they are, and how they leave.

Attention multiplies what it masks by 0, and 0 times NaN is NaN: a page with their keys would hurt
its next owner, and their published blocks all who share them. So they leave with the whole prefix
cache, and the pages that nobody else holds are to be zeroed.
"""

from __future__ import annotations

from asyncllm.engine.scheduler import Scheduler
from asyncllm.types import (
    NON_FINITE_TOKEN,
    FinishReason,
    Request,
    SequenceStatus,
    StepPlan,
    StepResult,
)


def non_finite_requests(plan: StepPlan, result: StepResult) -> list[Request]:
    """Live requests of which a row came back as NON_FINITE_TOKEN; cheap where there is none."""
    if min(result.token_ids, default=0) >= 0:
        return []
    rows = zip(plan.sampled, result.token_ids, strict=True)
    found = {
        seq.request.request_id: seq.request
        for seq, token_id in rows
        if token_id == NON_FINITE_TOKEN and seq.status is not SequenceStatus.FINISHED
    }
    return list(found.values())


def evict(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    """End them in the scheduler. Returns the pages to zero before anything else is launched."""
    blocks = scheduler.blocks
    pages = {
        page
        for request in requests
        for seq in request.sequences
        if seq.status is SequenceStatus.RUNNING
        for page in blocks.pages_of(seq)
    }
    for request in requests:
        scheduler.abort(request.request_id, FinishReason.ERROR)
    blocks.reset_prefix_cache()
    return [page for page in pages if blocks.device.is_free(page)]
