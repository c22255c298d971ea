"""A request before it is queued: what was asked for, and `Arrival`, which an abort of it ends.

Nothing else knows it yet: its engine starts, a thread encodes its text or its grammar is compiled.
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
    """One id on its way, whoever shares it: of two with one id the second to be queued is refused.

    `arrivals` has it until it is queued, refused or aborted; what is never awaited is forgotten
    with the last reference to it. `asyncio.timeout` without a deadline is asyncio's own cancel
    scope; an abort sets the deadline.
    """

    __slots__ = ("__weakref__", "_arrivals", "_scopes", "is_aborted", "request_id")

    def __init__(self, request_id: str, arrivals: Arrivals) -> None:
        self.request_id = request_id
        self.is_aborted = False
        self._arrivals = arrivals
        self._scopes: list[asyncio.Timeout] = []

    async def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """`work` queues the request at its end. False, and at once, where it is aborted before."""
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
        """Each scope that it ends must read `is_aborted`, perhaps in this very iteration."""
        self.is_aborted = True
        for scope in self._scopes:
            scope.reschedule(0.0)


Arrivals = WeakValueDictionary[str, Arrival]  # of one engine


@dataclass(slots=True, frozen=True)
class Submission:
    """A request as it was asked for, nothing of it checked but its sampling parameters.

    `params`: None for the model's defaults. A prompt that was parsed already may hold its ids.
    """

    arrival: Arrival
    prompt: PromptInput | ParsedPrompt
    params: SamplingParams | None
    sink: Sink
    text_sink: TextSink | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    adds_lora: bool = False  # loaded where it is not

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """`work` queues it; one that is aborted before has its end told, although nobody knows its
        token ids."""
        if await self.arrival.run(work):
            return
        text = self.prompt if isinstance(self.prompt, str) else None
        now, params = time.monotonic(), self.params or SamplingParams()
        answers = [CompletionOutput(i, "", [], finish_reason="abort") for i in range(params.n)]
        metrics = RequestMetrics(arrival_time=now, finished_time=now)
        name = self.arrival.request_id
        self.sink(RequestOutput(name, text, [], None, answers, True, metrics))
