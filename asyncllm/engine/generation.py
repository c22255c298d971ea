"""`Generation`, the result of `generate()`: await it for the final output, or iterate all outputs.

It aborts its request when it is dropped: if an `async for` is left early, or the last reference is
gone, the request's pages are freed within a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any

from asyncllm.engine.output_collector import OutputCollector
from asyncllm.engine.output_state import Sink
from asyncllm.outputs import RequestOutput
from asyncllm.sampling_params import RequestOutputKind


class _Mailbox:
    """Holds a request's outputs until they are read. The engine refers to this, not to the
    `Generation`, which is collected when the application drops it."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self.kind = kind
        self.loop = asyncio.get_running_loop()
        self.ready: deque[RequestOutput] = deque()
        self.arrived = asyncio.Event()
        self.finished = False
        self._collector = OutputCollector()

    def receive(self, delta: RequestOutput) -> None:
        """The request's sink, which the engine calls on the loop, at most once per step."""
        self.finished = delta.finished
        if self.kind is RequestOutputKind.DELTA:
            self.ready.append(delta)
        else:
            self._collector.add(delta)
            if delta.finished or self.kind is RequestOutputKind.CUMULATIVE:
                self.ready.clear()  # a slow reader needs the newest only
                self.ready.append(self._collector.output)
        if self.ready or self.finished:  # with FINAL_ONLY the reader sleeps until the end
            self.arrived.set()


class Generation:
    """One request's outputs. The request is submitted when this is first awaited or iterated.

    Awaiting returns the final, complete `RequestOutput`. Iterating yields an output per step:
    cumulative, a delta, or only the last one, by the request's `output_kind`.
    Raises what submitting raises. If the request fails later: `InvalidRequestError` if its own
    fields allow no token, `QueueFullError` if it waited too long, else `RequestFailedError`.
    """

    def __init__(
        self,
        submit: Callable[[Sink], Coroutine[Any, Any, None]],
        abort: Callable[[], None],
        kind: RequestOutputKind,
    ) -> None:
        self._submit = submit
        self._abort = abort
        self._kind = kind
        self._mailbox: _Mailbox | None = None  # None until it is being submitted
        self._is_queued = False
        self._last: RequestOutput | None = None

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._final().__await__()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        mailbox = self._mailbox
        if mailbox is None:
            mailbox = self._mailbox = _Mailbox(self._kind)
            await self._or_abort(self._submit(mailbox.receive))
            self._is_queued = True
        while not mailbox.ready:
            if mailbox.finished:
                raise StopAsyncIteration
            mailbox.arrived.clear()
            await self._or_abort(mailbox.arrived.wait())
        output = mailbox.ready.popleft()
        if output.error is not None:
            raise output.error
        self._last = output
        return output

    async def aclose(self) -> None:
        """Abort the request if it is still running."""
        if self._is_queued and self._mailbox is not None and not self._mailbox.finished:
            self._abort()

    async def _final(self) -> RequestOutput:
        """Also works a second time, or after iterating: the last output is complete."""
        if self._mailbox is None:
            self._kind = RequestOutputKind.FINAL_ONLY
        elif self._kind is RequestOutputKind.DELTA:
            raise RuntimeError("a generation that was iterated by deltas cannot be awaited")
        async for _ in self:
            pass
        if self._last is None:
            raise RuntimeError("a generation that failed or was aborted has no final output")
        return self._last

    async def _or_abort(self, work: Coroutine[Any, Any, Any]) -> None:
        """Await `work`. If it is cancelled or raises, abort the request."""
        try:
            await work
        except BaseException:
            if self._is_queued:
                self._abort()
            if self._mailbox is not None:
                self._mailbox.finished = True  # no output will come
            raise

    def __del__(self) -> None:
        """It may run in any thread, so the abort is scheduled on the loop."""
        if self._is_queued and self._mailbox is not None and not self._mailbox.finished:
            with suppress(RuntimeError):  # the loop is closed
                self._mailbox.loop.call_soon_threadsafe(self._abort)
