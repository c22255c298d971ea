"""The live requests: keeps scheduler and output processor in agreement, and limits the queue.

    a request starts   add
    it ends            by its tokens or its text     take, then emit; jump_forward
                       by its client                 abort
                       by waiting too long           expire
                       by an error                   end, fail, fail_sequence, restart

Invariant: between two calls a request is live in both the scheduler and the output processor, or in
neither. There are two exceptions: a request that ended in `take` stays in the outputs until `emit`,
and a beam search is in the outputs only, as each beam is a request of its own. A request that has
ended has had its last output.

Requests that wait for their first step are counted, with their prompt tokens, and refused above a
limit. A preempted request is not counted and does not time out. This file runs no step and knows no
device.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from asyncllm.engine.output_collector import BestAnswers
from asyncllm.engine.output_processor import OutputProcessor
from asyncllm.engine.output_state import Sink, TextSink
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.stats import AbortCause
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import InvalidRequestError, QueueFullError, RequestFailedError
from asyncllm.step_plan import StepPlan
from asyncllm.types import Request, Sequence, SequenceStatus, StepResult, TokenLogprobs, TokenUpdate

logger = logging.getLogger("asyncllm")

EXPIRY_CHECK_SECONDS = 1.0


class LiveRequests:
    """aborts: counts the aborts of clients by cause. max_queue_seconds: may be infinite."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        aborts: Counter[AbortCause],
        *,
        max_queued_requests: int,
        max_queued_tokens: int,
        max_queue_seconds: float,
    ) -> None:
        self.scheduler = scheduler  # `restart` replaces it
        self.outputs = OutputProcessor(tokenizer)
        self._aborts = aborts
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._max_queue_seconds = max_queue_seconds
        self._num_queued = self._num_queued_tokens = 0  # requests before their first step
        self._next_expiry_check = 0.0
        self._updates: tuple[list[TokenUpdate], dict[int, list[TokenLogprobs]]] | None = None
        self._is_emitting = False  # while sinks are called, aborts are deferred
        self._deferred: list[tuple[str, AbortCause]] = []

    def check_room(self, request_id: str, num_tokens: int = 0) -> None:
        """Raises `QueueFullError` if the queue has no room for `num_tokens` (0: not known yet).

        An empty queue takes a prompt of any length.
        """
        if self._num_queued >= self._max_queued_requests:
            raise QueueFullError(
                f"request {request_id}: {self._num_queued} requests wait already, "
                f"max_queued_requests is {self._max_queued_requests}"
            )
        if self._num_queued and self._num_queued_tokens + num_tokens > self._max_queued_tokens:
            raise QueueFullError(
                f"request {request_id}: {self._num_queued_tokens} prompt tokens wait already, with "
                f"its {num_tokens} they are over max_queued_tokens ({self._max_queued_tokens})"
            )

    @contextmanager
    def waiting(self, request: Request) -> Iterator[None]:
        """Count `request` as queued while it waits for something before `add`.

        Raises `QueueFullError`.
        """
        num_tokens = len(request.prompt_token_ids)
        self.check_room(request.request_id, num_tokens)
        self._num_queued += 1
        self._num_queued_tokens += num_tokens
        try:
            yield
        finally:
            self._num_queued -= 1
            self._num_queued_tokens -= num_tokens

    def add(self, request: Request, sink: Sink, text_sink: TextSink | None) -> None:
        """Raises `InvalidRequestError` if a request with this id is live."""
        name = request.request_id
        if name in self.outputs.requests:
            raise InvalidRequestError(f"request_id {name!r} is in use", "request_id")
        params = request.sampling_params
        if len(request.sequences) > params.n and not params.use_beam_search:
            sink, text_sink = BestAnswers(request, sink).receive, None
        self.outputs.add(request, sink, text_sink)
        if request.parent is None:
            self._num_queued += 1
            self._num_queued_tokens += len(request.prompt_token_ids)
        if not params.use_beam_search:
            self.scheduler.add(request)

    def planned(self, plan: StepPlan) -> None:
        """Requests whose first step this is leave the queue."""
        for init in plan.slot_inits:
            request = init.seq.request.parent or init.seq.request
            if _is_queued(request):
                self._leave_queue(request)
                request.metrics.first_scheduled_time = time.monotonic()

    def _leave_queue(self, request: Request) -> None:
        """To be called at the first step, or at the end."""
        if request.parent is None and _is_queued(request):
            self._num_queued -= 1
            self._num_queued_tokens -= len(request.prompt_token_ids)

    # --- results of a step -------------------------------------------------------------------

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """Append a finished step's tokens and end sequences. Call `emit` before the next `plan`."""
        assert self._updates is None, "a step was taken that was not emitted"
        self._updates = self.scheduler.finish_step(plan, result), result.prompt_logprobs

    def emit(self) -> None:
        """Send the taken step's output to clients, and end sequences at their stop strings."""
        if self._updates is not None:
            updates, self._updates = self._updates, None
            self._emit(*updates)

    def emit_whole(self, updates: list[TokenUpdate], now: float) -> None:
        """Send tokens of a beam search, which the scheduler does not know, to its client."""
        self.outputs.process(updates, {}, now, were_complete=True)
        self.outputs.forget_ended()

    def jump_forward(self, forced: list[tuple[Sequence, list[int]]]) -> None:
        """Append forced tokens to sequences that are still running."""
        updates: list[TokenUpdate] = []
        for seq, token_ids in forced:
            if seq.status is SequenceStatus.RUNNING:
                updates += self.scheduler.jump_forward(seq, token_ids)
        if updates:
            self._emit(updates, {})

    def _emit(
        self, updates: list[TokenUpdate], prompt_logprobs: dict[int, list[TokenLogprobs]]
    ) -> None:
        self._is_emitting = True
        stops = self.outputs.process(updates, prompt_logprobs, time.monotonic())
        self._is_emitting = False
        for stop in stops:
            self.scheduler.finish(*stop)
        self._abort_deferred()
        self.outputs.forget_ended()

    # --- other ends of a request -------------------------------------------------------------

    def abort(self, request_id: str, cause: AbortCause) -> bool:
        """End a request for its client. False if it is not live, or if a sink asks: then it is
        aborted after all sinks are called."""
        if self._is_emitting:
            self._deferred.append((request_id, cause))
            return False
        request = self.end(request_id)
        if request is not None and request.parent is None:
            self._aborts[cause] += 1
        return request is not None

    def _abort_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for request_id, cause in deferred:
            self.abort(request_id, cause)

    def expire(self, now: float) -> None:
        """End requests that have waited too long, checked once a second. now: monotonic seconds."""
        if now < self._next_expiry_check:
            return
        self._next_expiry_check = now + EXPIRY_CHECK_SECONDS
        limit = f"max_queue_seconds ({self._max_queue_seconds:g})"
        for request in self._requests():
            if now - request.metrics.arrival_time < self._max_queue_seconds:
                break
            if request.parent is None and _is_queued(request):
                error = QueueFullError(f"request {request.request_id}: waited over {limit}")
                self.end(request.request_id, error)

    def fail(self, requests: list[Request], message: str) -> None:
        """End these requests, as far as they are live, with an error of the engine."""
        for request in requests:
            name = (request.parent or request).request_id
            self.end(request.request_id, RequestFailedError(f"request {name}: {message}"))

    def end(self, request_id: str, error: Exception | None = None) -> Request | None:
        """End a request with an error, or as aborted. None if it is not live."""
        self.scheduler.abort(request_id, "abort" if error is None else "error")
        request = self.outputs.end(request_id, time.monotonic(), error)
        if request is not None:
            self._leave_queue(request)
            self.outputs.forget_ended()
        return request

    def fail_sequence(self, seq: Sequence, what: str, error: BaseException) -> None:
        """End the request of `seq`, if it is live: its own grammar or processor has raised."""
        request = seq.request
        if seq.status is SequenceStatus.FINISHED:
            return
        if isinstance(error, InvalidRequestError):  # the request is at fault, so no log entry
            self.end(request.request_id, error.with_traceback(None))
        else:
            logger.error("request %s: %s", request.request_id, what, exc_info=error)
            self.fail([request], f"{what}: {type(error).__name__}: {error}")

    def fail_all(self, message: str) -> None:
        self.fail(self._requests(), message)

    def restart(self, scheduler: Scheduler, message: str, *, keep_queued: bool) -> None:
        """Replace the scheduler by an empty one, after a failure.

        keep_queued: requests before their first step stay queued. All others end with an error,
        also those that ended in a step whose output is not emitted.
        """
        self._is_emitting, self._updates = False, None
        self.scheduler = scheduler
        for request in self._requests():
            if keep_queued and _is_queued(request.parent or request):
                if not request.sampling_params.use_beam_search:
                    scheduler.add(request)
            else:
                self.fail([request], message)
        self._abort_deferred()

    # --- invariants --------------------------------------------------------------------------

    def _requests(self) -> list[Request]:
        return [owner.request for owner in self.outputs.requests.values()]

    def check_empty(self) -> None:
        """Assert that nothing is left of any request."""
        self.scheduler.check_empty()
        self.outputs.check_empty()
        assert not (self._num_queued or self._num_queued_tokens), "the queue is miscounted"


def _is_queued(request: Request) -> bool:
    """Whether it still waits for its first step."""
    return request.metrics.first_scheduled_time is None
