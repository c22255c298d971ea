"""A request before it is queued: its arguments, and `Arrival`, by which it can be aborted.

At this time the engine is starting, a thread tokenises the prompt, or the grammar is compiled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from asyncllm.engine.output_state import Sink, TextSink
from asyncllm.engine.text.prompt import ParsedPrompt, PromptInput
from asyncllm.lora import LoRARequest
from asyncllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from asyncllm.sampling_params import SamplingParams


class Arrival:
    """A request id that is not queued yet. Requests with the same id share it; the second of them
    to be queued is refused.

    It is in `arrivals` until it is queued, refused or aborted; one that is never awaited is garbage
    collected. `asyncio.timeout` without a deadline serves as a cancel scope: an abort sets the
    deadline.
    """

    __slots__ = ("__weakref__", "_arrivals", "_scopes", "is_aborted", "request_id")

    def __init__(self, request_id: str, arrivals: Arrivals) -> None:
        self.request_id = request_id
        self.is_aborted = False
        self._arrivals = arrivals
        self._scopes: list[asyncio.Timeout] = []

    async def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`, which ends by queueing the request. False as soon as it is aborted."""
        if self.is_aborted:
            work.close()
            return False
        scope = asyncio.timeout(None)
        self._scopes.append(scope)
        try:
            async with scope:
                await work
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._scopes.remove(scope)
            if not (self._scopes or self.is_aborted):
                self._arrivals.pop(self.request_id, None)
        return not self.is_aborted

    def abort(self) -> None:
        """Cancel all `run` calls. Sets `is_aborted` first, as they may read it at once."""
        self.is_aborted = True
        for scope in self._scopes:
            scope.reschedule(0.0)


Arrivals = WeakValueDictionary[str, Arrival]  # by request id


@dataclass(slots=True, frozen=True)
class Submission:
    """The arguments of a request. Only its sampling parameters are checked yet.

    params: None for the model's defaults. A parsed prompt may have its token ids already.
    """

    arrival: Arrival
    prompt: PromptInput | ParsedPrompt
    params: SamplingParams | None
    sink: Sink
    text_sink: TextSink | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    adds_lora: bool = False  # whether to load `lora_request` if it is not loaded

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which queues the request. If it is aborted before, send its final output."""
        if await self.arrival.run(work):
            return
        text = self.prompt if isinstance(self.prompt, str) else None
        now, params = time.monotonic(), self.params or SamplingParams()
        answers = [CompletionOutput(i, "", [], finish_reason="abort") for i in range(params.n)]
        metrics = RequestMetrics(arrival_time=now, finished_time=now)
        name = self.arrival.request_id
        self.sink(RequestOutput(name, text, [], None, answers, True, metrics))
