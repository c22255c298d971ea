"""Ends requests whose row has no token: logits that are not finite, or every token forbidden.

NaN in the KV cache is contagious: attention multiplies masked positions by 0, and 0 times NaN is
NaN, so it would reach the next owner of a page and all requests that share a cached block. Such
requests end, the whole prefix cache is reset, and the pages that only they held are zeroed. If a
request ended while its step was in flight, its pages are unknown: then all free pages are zeroed.
The pages of a request that forbids every token are fine.
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
from asyncllm.worker.worker import Worker

FORBIDDING = ("allowed_token_ids", "bad_words", "min_tokens")  # in the order of the message


def end_without_token(
    plan: StepPlan, result: StepResult, live: LiveRequests, worker: Worker
) -> None:
    """End them, each with its reason. Cheap if every row has a token."""
    if min(result.token_ids, default=0) >= 0:
        return
    rows = list(zip(plan.sampled, result.token_ids, strict=True))
    broken = [seq for seq, token_id in rows if token_id == NON_FINITE_TOKEN]
    if bad := _live_requests(broken):
        worker.clear_pages(_evict(live.scheduler, bad))
        live.fail(bad, "its logits are not finite")
    if any(seq.finish_reason != "error" for seq in broken):  # it ended before this was known
        live.scheduler.blocks.reset_prefix_cache()
        worker.clear_pages(live.scheduler.blocks.device.free_pages())
    for request in _live_requests([seq for seq, token_id in rows if token_id == NO_TOKEN_LEFT]):
        live.end(request.request_id, _no_token_left(request))


def _live_requests(seqs: list[Sequence]) -> list[Request]:
    """The requests of sequences that have not ended, each once."""
    live = (seq.request for seq in seqs if seq.status is not SequenceStatus.FINISHED)
    return list({request.request_id: request for request in live}.values())


def _no_token_left(request: Request) -> Exception:
    """Names the fields that forbid tokens; without any, a logits processor is the cause."""
    what = "no token is left that may come next"
    given = [name for name in FORBIDDING if getattr(request.sampling_params, name)]
    if not given:
        return RequestFailedError(f"request {request.request_id}: {what}")
    return InvalidRequestError(f"{' and '.join(given)}: {what}", given[0])


def _evict(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    """End them in the scheduler. Returns the pages to zero before the next launch."""
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
    if blocks.windows:  # pages that windows have passed are unknown
        return blocks.device.free_pages()
    return [page for page in pages if blocks.device.is_free(page)]
