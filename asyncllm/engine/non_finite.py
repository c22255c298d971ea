"""Requests whose row came back without a token: who they are, and how they leave.

Logits that are NaN or infinite: attention multiplies what it masks by 0, and 0 times NaN is NaN, so
a page with their keys would hurt its next owner, and their published blocks all who share them.
Such requests leave with the whole prefix cache, and the pages that nobody else holds are to be
zeroed. Of one that ended while its step was in flight nobody knows the pages any more: then all
that are free are zeroed. Nothing is wrong with those of a request that forbids every token itself.
"""

from __future__ import annotations

from itertools import chain

from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.scheduler import Scheduler
from asyncllm.errors import InvalidRequestError, RequestFailedError
from asyncllm.step_plan import StepPlan
from asyncllm.types import (
    NO_TOKEN_LEFT,
    NON_FINITE_TOKEN,
    FinishReason,
    Request,
    SequenceStatus,
    StepResult,
)
from asyncllm.worker.worker import ClearPages, Worker

FORBIDDING = ("allowed_token_ids", "bad_words", "min_tokens")  # in the order of blame


def end_without_token(
    plan: StepPlan, result: StepResult, live: LiveRequests, worker: Worker
) -> None:
    """Each with the reason. Cheap where every row has a token."""
    if min(result.token_ids, default=0) >= 0:
        return
    if bad := _requests_with(NON_FINITE_TOKEN, plan, result):
        worker.command(ClearPages(_evict(live.scheduler, bad)))
        live.fail(bad, "its logits are not finite")
    if _left_unseen(plan, result):
        live.scheduler.blocks.reset_prefix_cache()
        worker.command(ClearPages(live.scheduler.blocks.device.free_pages()))
    for request in _requests_with(NO_TOKEN_LEFT, plan, result):
        live.end(request, _no_token_left(request))


def _requests_with(token_id: int, plan: StepPlan, result: StepResult) -> list[Request]:
    """Live requests of which a row came back as `token_id`."""
    rows = zip(plan.sampled, result.token_ids, strict=True)
    found = {
        seq.request.request_id: seq.request
        for seq, token in rows
        if token == token_id and seq.status is not SequenceStatus.FINISHED
    }
    return list(found.values())


def _left_unseen(plan: StepPlan, result: StepResult) -> bool:
    """Whether a sequence ended, and not here, before its logits were known not to be finite."""
    rows = zip(plan.sampled, result.token_ids, strict=True)
    return any(
        token == NON_FINITE_TOKEN
        and seq.status is SequenceStatus.FINISHED
        and seq.finish_reason is not FinishReason.ERROR
        for seq, token in rows
    )


def _no_token_left(request: Request) -> Exception:
    """Blames the fields by which the request forbids tokens, if any; else a processor did."""
    what = "no token is left that may come next"
    given = [name for name in FORBIDDING if getattr(request.sampling_params, name)]
    if not given:
        return RequestFailedError(f"request {request.request_id}: {what}")
    return InvalidRequestError(f"{' and '.join(given)}: {what}", given[0])


def _evict(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    """End them in the scheduler. Returns the pages to zero before anything else is launched."""
    blocks = scheduler.blocks
    pages = {
        page
        for request in requests
        for seq in request.sequences
        if seq.status is SequenceStatus.RUNNING
        for page in chain(*blocks.pages_of(seq))
    }
    for request in requests:
        scheduler.abort(request.request_id, FinishReason.ERROR)
    blocks.reset_prefix_cache()
    if blocks.has_windows:  # which have left pages behind
        return blocks.device.free_pages()
    return [page for page in pages if blocks.device.is_free(page)]
