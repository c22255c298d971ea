"""Requests that an engine in another process has: what their clients are told of them here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncllm.engine.arrival import Submission
from asyncllm.engine.data_parallel import wire
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import AbortCause
from asyncllm.engine.text.prompt import parse_prompt
from asyncllm.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from asyncllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from asyncllm.sampling_params import SamplingParams

logger = logging.getLogger("asyncllm")


@dataclass(slots=True, eq=False)
class _Live:
    """A request that the engine has, or is about to take."""

    given: Submission
    text: str | None
    token_ids: list[int]
    open: set[int]  # answers that go on
    metrics: RequestMetrics
    accepted: asyncio.Future[None]


class RemoteRequests:
    """`send` tells the engine, `rank` and `recorder` are its."""

    def __init__(self, rank: int, recorder: Recorder, send: Callable[[wire.Message], None]) -> None:
        self._rank = rank
        self._recorder = recorder
        self._send = send
        self._live: dict[str, _Live] = {}

    async def submit(self, given: Submission, params: SamplingParams) -> None:
        """Returns when the engine has taken it. Raises what it raised."""
        name, parsed = given.arrival.request_id, parse_prompt(given.prompt)
        if name in self._live:
            raise InvalidRequestError(f"request_id {name!r} is in use", "request_id")
        message = wire.Submit(
            name,
            parsed,
            wire.params_to_wire(params),
            given.priority,
            given.cache_salt,
            None if given.lora_request is None else wire.Adapter.of(given.lora_request),
            given.text_sink is not None,
        )
        try:
            self._send(message)
        except wire.UNENCODED as error:
            raise InvalidRequestError(f"request {name!r} cannot be sent: {error}") from error
        live = self._live[name] = _Live(
            given,
            parsed.text,
            parsed.token_ids or [],
            set(range(params.n)),
            RequestMetrics(arrival_time=time.monotonic()),
            asyncio.get_running_loop().create_future(),
        )
        try:
            await live.accepted
        except asyncio.CancelledError:
            self._drop(name, "application")
            raise
        if given.arrival.is_aborted:
            self._drop(name, "application")

    def settle(self, request_id: str, error: wire.Error | None) -> None:
        """The engine has taken it, or refused it."""
        live = self._live.get(request_id)
        if live is None or live.accepted.done():
            return
        if error is None:
            live.accepted.set_result(None)
        else:
            del self._live[request_id]
            live.accepted.set_exception(error.error)

    def _drop(self, request_id: str, cause: AbortCause) -> _Live | None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._send(wire.Abort(request_id, cause))
        return live

    def abort(self, request_id: str, cause: AbortCause) -> None:
        """Its client hears of it at once; what the engine still says of it is dropped."""
        known = self._live.get(request_id)
        if known is None or not known.accepted.done():  # else `submit` is told
            return
        self._drop(request_id, cause)
        self._recorder.aborts[cause] += 1
        self._tell(known, self._last(known, "abort"))

    def lose(self, why: str) -> None:
        """All end: the engine is lost."""
        live, self._live = self._live, {}
        for name, each in live.items():
            if not each.accepted.done():
                each.accepted.set_exception(EngineDeadError(f"engine {self._rank}: {why}"))
            else:
                error = RequestFailedError(f"request {name}: engine {self._rank}: {why}")
                self._tell(each, self._last(each, "error", error))
                self._recorder.finished["error"] += 1

    def check_idle(self) -> None:
        assert not self._live, f"requests are live: {sorted(self._live)}"

    # --- what the engine says ----------------------------------------------------------------

    def take(self, message: wire.Output) -> None:
        if (live := self._live.get(message.request_id)) is None:
            return
        if message.finished:
            del self._live[message.request_id]
        live.open -= {each.index for each in message.outputs if each.finish_reason is not None}
        live.metrics = message.metrics or live.metrics
        self._tell(
            live,
            RequestOutput(
                message.request_id,
                live.text,
                live.token_ids,
                message.prompt_logprobs,
                message.outputs,
                message.finished,
                live.metrics,
                message.num_cached_tokens,
                None if message.error is None else message.error.error,
                message.num_unreturned_tokens,
            ),
        )

    def take_text(self, message: wire.Text) -> None:
        if (live := self._live.get(message.request_id)) is None:
            return
        assert live.given.text_sink is not None, "text was not asked for"
        try:
            live.given.text_sink(message.text, message.num_tokens)
        except Exception as error:
            self._sink_failed(live, error, is_over=False)

    def _last(
        self, live: _Live, reason: FinishReason, error: Exception | None = None
    ) -> RequestOutput:
        live.metrics.finished_time = time.monotonic()
        outputs = [CompletionOutput(i, "", [], finish_reason=reason) for i in sorted(live.open)]
        return RequestOutput(
            live.given.arrival.request_id, live.text, live.token_ids, None, outputs, True,
            live.metrics, error=error,
        )  # fmt: skip

    def _tell(self, live: _Live, output: RequestOutput) -> None:
        try:
            live.given.sink(output)
        except Exception as error:
            self._sink_failed(live, error, output.finished)

    def _sink_failed(self, live: _Live, error: Exception, is_over: bool) -> None:
        """It ends its own request, with an error, and nobody else's."""
        name = live.given.arrival.request_id
        logger.error("request %s: its sink failed", name, exc_info=error)
        if not is_over and self._drop(name, "application") is not None:
            failed = RequestFailedError(f"request {name}: its sink failed: {error}")
            self._tell(live, self._last(live, "error", failed))
