"""An engine in a process of its own, as the server's process sees it.

The process is started here, told of requests, and watched: where it ends, or says nothing for
`SILENCE_SECONDS`, its requests end with an error and it is started again, unless that has happened
as often as `Restarts` allows; then the engine has failed. What observers read
are the records that it sends for each step, a turn of the loop after its tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncllm.engine.arrival import Submission
from asyncllm.engine.core import Restarts
from asyncllm.engine.data_parallel import wire
from asyncllm.engine.data_parallel.remote_adapters import RemoteAdapters
from asyncllm.engine.data_parallel.spawn import EngineProcess
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import AbortCause, SchedulerStats, StatLogger
from asyncllm.engine.text.prompt import parse_prompt
from asyncllm.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from asyncllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from asyncllm.sampling_params import SamplingParams
from asyncllm.worker.work_counts import WorkCounts

logger = logging.getLogger("asyncllm")

SILENCE_SECONDS = 8.0  # of an engine that beats each second
CHECK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class _Live:
    """A request that the engine has, or is about to take."""

    given: Submission
    text: str | None
    token_ids: list[int]
    open: set[int]  # answers that go on
    metrics: RequestMetrics
    accepted: asyncio.Future[None]


class RemoteCore:
    """Implements `Core` and `Replica`. `changed` is called when it begins or ceases to serve."""

    input_processor: InputProcessor  # set by who starts several: one serves all

    def __init__(
        self,
        rank: int,
        args: Mapping[str, Any],
        environment: Mapping[str, str],
        recorder: Recorder,
        stat_loggers: list[StatLogger],
    ) -> None:
        """args: fields of `EngineArgs` of one engine."""
        self.rank = rank
        self.recorder = recorder
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.changed: Callable[[bool], None] = lambda is_up: None
        self.work = WorkCounts()
        self.adapters = RemoteAdapters(self._send) if args.get("enable_lora") else None
        self.ready: wire.Ready
        self._args = args
        self._environment = environment
        self._stat_loggers = stat_loggers
        self._live: dict[str, _Live] = {}
        self._stats = SchedulerStats()
        self._beat: wire.Beat | None = None
        self._down: str | None = "loading"  # why it has no process that serves
        self._process: EngineProcess | None = None
        self._restarts = Restarts()
        self._starting: asyncio.Future[None] | None = None  # until it is ready
        self._task: asyncio.Task[None] | None = None

    # --- its process -------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises `ValueError` or `ModelLoadError` for what cannot run."""
        await self._start_process()
        self._down = None
        self._task = asyncio.create_task(self._watch(), name=f"asyncllm engine {self.rank}")

    async def _start_process(self) -> None:
        self._starting = asyncio.get_running_loop().create_future()
        self._process = EngineProcess(self._environment, self._received)
        try:
            await self._process.connect()
            level = logging.getLogger().getEffectiveLevel()
            self._process.connection.send(wire.Start(dict(self._args), self.rank, level))
            ends: list[asyncio.Future[Any]] = [self._starting, self._process.lost]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._starting.done():
                raise EngineDeadError(f"engine {self.rank}: {self._process.lost.result()}")
            self._starting.result()
        except BaseException:
            await self._process.kill()
            raise

    async def _watch(self) -> None:
        """Until it has failed for good."""
        while not self.failed.done():
            why = await self._until_lost()
            self._lose(why)
            if self._restarts.may_start():
                logger.error("engine %d: %s; it is started again", self.rank, why)
                try:
                    await self._restart()
                    continue
                except Exception as error:
                    logger.exception("engine %d cannot be started again", self.rank)
                    why = f"{why}; and then: {error}"
            self._down = why
            self.failed.set_result(why)

    async def _until_lost(self) -> str:
        assert self._process is not None
        process = self._process
        while True:
            await asyncio.wait([process.lost], timeout=CHECK_SECONDS)
            silence = time.monotonic() - process.last_heard
            if not process.lost.done() and silence < SILENCE_SECONDS:
                continue
            why = process.lost.result() if process.lost.done() else f"silent for {silence:.0f} s"
            ended = await process.kill()
            return f"{why} ({ended})"

    def _lose(self, why: str) -> None:
        """End its requests; nothing new is placed here."""
        self._down = f"its process was lost: {why}"
        self._stats, self._beat = SchedulerStats(), None
        self.changed(False)
        if self.adapters is not None:
            self.adapters.lost(why)
        live, self._live = self._live, {}
        for name, each in live.items():
            if not each.accepted.done():
                each.accepted.set_exception(EngineDeadError(f"engine {self.rank}: {why}"))
            else:
                error = RequestFailedError(f"request {name}: engine {self.rank}: {why}")
                self._tell(each, self._last(each, "error", error))
                self.recorder.finished["error"] += 1

    async def _restart(self) -> None:
        await self._start_process()
        if self.adapters is not None:
            await self.adapters.restore()
        self._down = None
        logger.warning("engine %d serves again", self.rank)
        self.changed(True)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._lose("it is closed")
        if self._process is not None:
            self._process.connection.send(wire.Close())
            await self._process.end()

    # --- messages ----------------------------------------------------------------------------

    def _send(self, message: wire.Message) -> None:
        if self._process is not None:
            self._process.connection.send(message)

    def _received(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Text(request_id, text, num_tokens):
                if (live := self._live.get(request_id)) is not None:
                    self._tell_text(live, text, num_tokens)
            case wire.Output():
                if (live := self._live.get(message.request_id)) is not None:
                    self._take(live, message)
            case wire.Record():
                self._record(message)
            case wire.Accepted(request_id, error):
                self._settle(request_id, error)
            case wire.Beat():
                self._take_beat(message)
            case wire.Done(number, error):
                if self.adapters is not None:
                    self.adapters.done(number, error)
            case wire.Ready():
                self.ready, self._stats = message, message.stats
                if self._starting is not None:
                    self._starting.set_result(None)
            case wire.Failed(error):
                if self._starting is not None and not self._starting.done():
                    self._starting.set_exception(error.error)
                elif self._process is not None:
                    self._process.lose(error.text)

    def _settle(self, request_id: str, error: wire.Error | None) -> None:
        live = self._live.get(request_id)
        if live is None or live.accepted.done():
            return
        if error is None:
            live.accepted.set_result(None)
        else:
            del self._live[request_id]
            live.accepted.set_exception(error.error)

    def _record(self, message: wire.Record) -> None:
        self._stats, iteration = message.stats, message.iteration
        for each in (self.recorder, *self._stat_loggers):
            try:
                each.record(message.stats, iteration)
            except Exception:  # it only watches: no request may end for it
                logger.exception("%r failed, and gets no more records", each)
                if each in self._stat_loggers:
                    self._stat_loggers.remove(each)

    def _take_beat(self, beat: wire.Beat) -> None:
        before, self._beat, self._stats = self.health(), beat, beat.stats
        if (self.health() is None) != (before is None):
            self.changed(self.health() is None)
        if self.adapters is not None:
            self.adapters.running, self.adapters.waiting = beat.running, beat.waiting
        totals = beat.totals
        self.recorder.host_seconds.update(totals["host_seconds"])
        self.recorder.loop_lag.load(*totals["loop_lag"])
        steps, self.work.num_tokens, self.work.num_padding = totals["work"]
        self.work.steps.update({(kind, mode): count for kind, mode, count in steps})

    # --- requests ----------------------------------------------------------------------------

    async def submit(self, given: Submission) -> None:
        """As `EngineCore.submit`."""
        name = given.arrival.request_id
        if self._down is not None:
            raise EngineDeadError(f"engine {self.rank}: {self._down}")
        if name in self._live:
            raise InvalidRequestError(f"request_id {name!r} is in use", "request_id")
        params = given.params or self.input_processor.default_params({})
        live = _live(given, params)
        self._send(
            wire.Submit(
                name,
                parse_prompt(given.prompt),
                wire.params_to_wire(params),
                given.priority,
                given.cache_salt,
                None if given.lora_request is None else wire.Adapter.of(given.lora_request),
                given.text_sink is not None,
            )
        )
        self._live[name] = live
        try:
            await live.accepted
        except asyncio.CancelledError:
            self._drop(name, "application")
            raise
        if given.arrival.is_aborted:
            self._drop(name, "application")

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
        self.recorder.aborts[cause] += 1
        self._tell(known, self._last(known, "abort"))

    def _take(self, live: _Live, message: wire.Output) -> None:
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

    def _tell_text(self, live: _Live, text: str, num_tokens: int) -> None:
        assert live.given.text_sink is not None, "text was not asked for"
        try:
            live.given.text_sink(text, num_tokens)
        except Exception as error:
            self._sink_failed(live, error, is_over=False)

    def _sink_failed(self, live: _Live, error: Exception, is_over: bool) -> None:
        """It ends its own request, with an error, and nobody else's."""
        name = live.given.arrival.request_id
        logger.error("request %s: its sink failed", name, exc_info=error)
        if not is_over and self._drop(name, "application") is not None:
            failed = RequestFailedError(f"request {name}: its sink failed: {error}")
            self._tell(live, self._last(live, "error", failed))

    # --- views -------------------------------------------------------------------------------

    @property
    def lora(self) -> RemoteAdapters:
        if self.adapters is None:
            raise InvalidRequestError("this engine was started without enable_lora", "lora_request")
        return self.adapters

    @property
    def startup(self) -> dict[str, Any]:
        return self.ready.startup

    @property
    def replicas(self) -> tuple[RemoteCore, ...]:
        return (self,)

    def health(self) -> str | None:
        if self._down is not None or self._beat is None:
            return self._down
        return self._beat.health

    def stats(self) -> SchedulerStats:
        return self._stats

    def picture(self, pages_per_cell: int) -> str:
        """Of the last beat: its cells that are next to the ones asked for."""
        if self._beat is None:
            return ""
        cells, every = self._beat.picture, self._beat.pages_per_cell
        count = -(-self._stats.num_pages // pages_per_cell)
        return "".join(
            cells[min(i * pages_per_cell // every, len(cells) - 1)] for i in range(count)
        )

    def observe(self) -> None:
        """Each record comes with its step's tokens, or a turn later."""

    def check_integrity(self) -> None:
        assert self._down is not None or self._process is not None, "it serves without a process"

    def check_idle(self) -> None:
        """As far as this process knows."""
        assert not self._live, f"requests are live: {sorted(self._live)}"

    def reset_prefix_cache(self) -> None:
        self._send(wire.ResetPrefixCache())


def _live(given: Submission, params: SamplingParams) -> _Live:
    parsed = parse_prompt(given.prompt)
    return _Live(
        given,
        parsed.text,
        parsed.token_ids or [],
        set(range(params.n)),
        RequestMetrics(arrival_time=time.monotonic()),
        asyncio.get_running_loop().create_future(),
    )
