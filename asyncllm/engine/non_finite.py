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
    Request,
    Sequence,
    SequenceStatus,
    StepResult,
)
from asyncllm.worker.ranks.messages import ClearPages
from asyncllm.worker.worker import Worker

FORBIDDING = ("allowed_token_ids", "bad_words", "min_tokens")  # in the order of blame


def end_without_token(
    plan: StepPlan, result: StepResult, live: LiveRequests, worker: Worker
) -> None:
    """Each with the reason. Cheap where every row has a token."""
    if min(result.token_ids, default=0) >= 0:
        return
    rows = list(zip(plan.sampled, result.token_ids, strict=True))
    broken = [seq for seq, token_id in rows if token_id == NON_FINITE_TOKEN]
    if bad := _live_requests(broken):
        worker.command(ClearPages(_evict(live.scheduler, bad)))
        live.fail(bad, "its logits are not finite")
    if any(seq.finish_reason != "error" for seq in broken):  # ended before, unseen
        live.scheduler.blocks.reset_prefix_cache()
        worker.command(ClearPages(live.scheduler.blocks.device.free_pages()))
    for request in _live_requests([seq for seq, token_id in rows if token_id == NO_TOKEN_LEFT]):
        live.end(request.request_id, _no_token_left(request))


def _live_requests(seqs: list[Sequence]) -> list[Request]:
    """Those of sequences that have not ended, each once."""
    live = (seq.request for seq in seqs if seq.status is not SequenceStatus.FINISHED)
    return list({request.request_id: request for request in live}.values())


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
        scheduler.abort(request.request_id, "error")
    blocks.reset_prefix_cache()
    if blocks.windows:  # which have left pages behind
        return blocks.device.free_pages()
    return [page for page in pages if blocks.device.is_free(page)]
