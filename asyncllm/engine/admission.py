"""How many requests may wait, with how many tokens, and for how long: the answer to overload.

Knows the requests that have not had their first step yet, oldest first. A preempted request waits
too, but it has been admitted: it counts no more, and no deadline ends it.
"""

from __future__ import annotations

from asyncllm.errors import QueueFullError
from asyncllm.types import Request

CHECK_INTERVAL_SECONDS = 1.0


class Admission:
    """`max_seconds` may be infinite."""

    def __init__(self, max_requests: int, max_tokens: int, max_seconds: float) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.max_seconds = max_seconds
        self._queued: dict[str, Request] = {}  # in order of arrival
        self._num_tokens = 0
        self._next_check = 0.0

    def check_room(self, request_id: str, num_tokens: int = 0) -> None:
        """Raises `QueueFullError` where a request of `num_tokens` (0: not known yet) cannot wait.

        A prompt longer than the whole limit may wait alone.
        """
        if len(self._queued) >= self._max_requests:
            raise QueueFullError(
                f"request {request_id}: {len(self._queued)} requests wait already, "
                f"max_queued_requests is {self._max_requests}"
            )
        if self._queued and self._num_tokens + num_tokens > self._max_tokens:
            raise QueueFullError(
                f"request {request_id}: {self._num_tokens} prompt tokens wait already, with its "
                f"{num_tokens} they are over max_queued_tokens ({self._max_tokens})"
            )

    def enter(self, request: Request) -> None:
        self._queued[request.request_id] = request
        self._num_tokens += len(request.prompt_token_ids)

    def leave(self, request: Request) -> None:
        """At its first step, or at its end before that; nothing where it is not queued."""
        if self._queued.pop(request.request_id, None) is not None:
            self._num_tokens -= len(request.prompt_token_ids)

    def holds(self, request: Request) -> bool:
        """Whether it still waits for its first step."""
        return request.request_id in self._queued

    def late(self, now: float) -> list[Request]:
        """Requests that have waited too long. Looks once a second; `now`: monotonic seconds."""
        if now < self._next_check:
            return []
        self._next_check = now + CHECK_INTERVAL_SECONDS
        late = []
        for request in self._queued.values():
            if now - request.metrics.arrival_time < self.max_seconds:
                break
            late.append(request)
        return late

    def check_empty(self) -> None:
        """Assert what must hold with no live request."""
        assert not self._queued and not self._num_tokens, f"queued: {list(self._queued)}"
