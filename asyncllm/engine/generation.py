"""A request from its arrival on: `Arrival` until it is queued, `Generation` until its end.

`Arrival` is there so that `abort` ends a request that nothing else knows yet: its engine starts, a
thread encodes its text or its grammar is compiled. `Generation` is the result of `generate()`, to
be awaited for the end or iterated until there, because an application wants either. It aborts its
request when it is dropped: leaving an `async for` early, or losing the last reference, frees its
pages within a step. `OutputCollector` joins its deltas into what it has produced so far, for who
wants the whole and for readers slower than the engine; `BestAnswers` chooses among them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from asyncllm.engine.output_state import Sink, TextSink
from asyncllm.engine.text.prompt import ParsedPrompt, PromptInput
from asyncllm.lora import LoRARequest
from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.sampling_params import RequestOutputKind, SamplingParams
from asyncllm.types import Request


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


class OutputCollector:
    """`add` deltas, read `output`, a copy that later deltas never change: it is linear in the text,
    `add` is not."""

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None  # but for its completions
        self._completions: dict[int, CompletionOutput] = {}  # but for their texts
        self._texts: dict[int, list[str]] = {}  # in pieces: strings that grow are copied each time

    def add(self, delta: RequestOutput) -> None:
        if self._whole is None:
            self._whole = replace(delta, outputs=[])
        else:
            _update(self._whole, delta)
        for completion in delta.outputs:
            known = self._completions.get(completion.index)
            if known is None:
                self._completions[completion.index] = _copy(completion, "")
                self._texts[completion.index] = [completion.text]
            else:
                _extend(known, completion)
                self._texts[completion.index].append(completion.text)

    @property
    def output(self) -> RequestOutput:
        """A copy of all so far, completions in order of their index; at least a delta was added."""
        assert self._whole is not None, "nothing was added yet"
        completions = [
            _copy(self._completions[index], "".join(self._texts[index]))
            for index in sorted(self._completions)
        ]
        self._texts = {c.index: [c.text] for c in completions}  # joined once
        return replace(self._whole, outputs=completions)


def _update(whole: RequestOutput, delta: RequestOutput) -> None:
    whole.finished = delta.finished
    whole.metrics = delta.metrics
    whole.num_cached_tokens = delta.num_cached_tokens
    whole.num_unreturned_tokens += delta.num_unreturned_tokens
    whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
    whole.error = whole.error or delta.error


def _extend(known: CompletionOutput, delta: CompletionOutput) -> None:
    known.token_ids += delta.token_ids
    if known.logprobs is not None and delta.logprobs is not None:
        known.logprobs += delta.logprobs
    known.cumulative_logprob = delta.cumulative_logprob
    known.finish_reason, known.stop_reason = delta.finish_reason, delta.stop_reason


def _copy(completion: CompletionOutput, text: str) -> CompletionOutput:
    logprobs = None if completion.logprobs is None else list(completion.logprobs)
    return replace(completion, text=text, token_ids=list(completion.token_ids), logprobs=logprobs)


class BestAnswers:
    """A sink before the client's `sink`, which gets one output: the best `n` of `best_of` answers.

    The best have the highest mean log-probability per token, as in OpenAI's `best_of`; a beam
    search has ranked its own. Log-probabilities that the client did not ask for are left out.
    """

    def __init__(self, request: Request, sink: Sink) -> None:
        self._request = request
        self._sink = sink
        self._collector = OutputCollector()

    def receive(self, delta: RequestOutput) -> None:
        self._collector.add(delta)
        if delta.finished:
            self._sink(self._choose(self._collector.output))

    def _choose(self, output: RequestOutput) -> RequestOutput:
        answers, params = output.outputs, self._request.sampling_params
        if not params.use_beam_search:
            answers = sorted(answers, key=_mean_logprob, reverse=True)
        best, rest = answers[: params.n], answers[params.n :]
        for index, answer in enumerate(best):
            answer.index = index
            if self._request.num_shown_logprobs is None and not params.logprob_token_ids:
                answer.logprobs = None
        num_rest = output.num_unreturned_tokens + sum(len(answer.token_ids) for answer in rest)
        return replace(output, outputs=best, num_unreturned_tokens=num_rest)


def _mean_logprob(answer: CompletionOutput) -> float:
    """An answer without a token is below every other."""
    if answer.cumulative_logprob is None or not answer.token_ids:
        return float("-inf")
    return answer.cumulative_logprob / len(answer.token_ids)


class _Mailbox:
    """Where the engine leaves a request's outputs. Apart from `Generation`, which the engine must
    not hold: its end is how we learn that nobody wants the outputs any more."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self.kind = kind
        self.loop = asyncio.get_running_loop()
        self.ready: deque[RequestOutput] = deque()
        self.arrived = asyncio.Event()
        self.finished = False
        self._collector = OutputCollector()

    def receive(self, delta: RequestOutput) -> None:
        """The sink: called by the engine on the loop, once per step that brings some."""
        self.finished = delta.finished
        if self.kind is RequestOutputKind.DELTA:
            self.ready.append(delta)
        else:
            self._collector.add(delta)
            if delta.finished or self.kind is RequestOutputKind.CUMULATIVE:
                self.ready.clear()  # a slow reader needs only the newest
                self.ready.append(self._collector.output)
        if self.ready or self.finished:  # FINAL_ONLY: its reader sleeps to the end
            self.arrived.set()


class Generation:
    """One request's outputs. The request is submitted when first awaited or iterated.

    Awaiting gives the final `RequestOutput`, with everything in it. Iterating gives an output per
    step, cumulative, deltas or only the last by the request's `output_kind`.
    Raises what submitting raises, and where the request fails later: `InvalidRequestError` if its
    grammar led nowhere, `QueueFullError` if it waited too long, else `RequestFailedError`.
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
        """A second time, or after a loop, too: the outputs that end one hold everything."""
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
        """Await; cancelled or refused, leave nothing running."""
        try:
            await work
        except BaseException:
            if self._is_queued:
                self._abort()
            if self._mailbox is not None:
                self._mailbox.finished = True  # refused, it hears nothing more
            raise

    def __del__(self) -> None:
        """A collection may happen in any thread; the engine is for the loop's alone."""
        if self._is_queued and self._mailbox is not None and not self._mailbox.finished:
            with suppress(RuntimeError):  # the loop is closed: nothing runs any more
                self._mailbox.loop.call_soon_threadsafe(self._abort)
