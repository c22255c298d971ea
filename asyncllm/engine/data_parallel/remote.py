"""An engine in a process of its own, as the server's process sees it.

The process is started and told of requests here; when, and what becomes of it when it is lost, is
for a `Supervisor` to say. What observers read are the records that it sends for each step, a turn
of the loop after its tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from asyncllm.engine.arrival import Submission
from asyncllm.engine.data_parallel import wire
from asyncllm.engine.data_parallel.links import EngineLink
from asyncllm.engine.data_parallel.remote_adapters import RemoteAdapters
from asyncllm.engine.data_parallel.remote_requests import RemoteRequests
from asyncllm.engine.data_parallel.spawn import EngineProcess
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import AbortCause, SchedulerStats
from asyncllm.errors import EngineDeadError, InvalidRequestError
from asyncllm.mesh_config import RankStats
from asyncllm.worker.work_counts import WorkCounts


class RemoteCore:
    """Implements `Core` and `Replica`. `changed` is called when it begins or ceases to serve."""

    input_processor: InputProcessor  # set by who starts several: one serves all

    def __init__(
        self,
        rank: int,
        args: Mapping[str, Any],
        environment: Mapping[str, str],
        recorder: Recorder,
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
        self._requests = RemoteRequests(rank, recorder, self._send)
        self._stats = SchedulerStats()
        self._beat: wire.Beat | None = None
        self._down: str | None = "loading"  # why it has no process that serves
        self._process: EngineProcess | None = None
        self._starting: asyncio.Future[None] | None = None  # until it is ready

    # --- its process -------------------------------------------------------------------------

    @property
    def process(self) -> EngineProcess:
        """The current or last process."""
        assert self._process is not None, f"engine {self.rank} has never been started"
        return self._process

    async def start(self, link: EngineLink | None) -> None:
        """Start a process, wait until it is ready, and load the adapters of the last one. link: to
        the engines that it shares experts with. Raises `ValueError` or `ModelLoadError`."""
        self._starting = asyncio.get_running_loop().create_future()
        self._process = EngineProcess(self._environment, self._received)
        try:
            await self._process.connect(() if link is None else link.sockets)
            level = logging.getLogger().getEffectiveLevel()
            place = None if link is None else link.place
            start = wire.Start(dict(self._args), self.rank, level, place)
            self._process.connection.send(start)
            await self._or_lost(self._starting)
            if self.adapters is not None:
                await self._or_lost(asyncio.ensure_future(self.adapters.restore()))
        except BaseException as error:
            end = await self._process.kill()
            if isinstance(error, EngineDeadError) and self._process.lost.done():
                raise EngineDeadError(f"{error} ({end})") from None
            raise

    async def _or_lost(self, work: asyncio.Future[None]) -> None:
        """Wait for it, or until the process is lost. Raises `EngineDeadError`."""
        ends: list[asyncio.Future[Any]] = [work, self.process.lost]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EngineDeadError(f"engine {self.rank}: {self.process.lost.result()}")
            work.result()
        finally:
            work.cancel()

    def lose(self, why: str) -> None:
        """The process is lost: end its requests, and refuse new ones."""
        self._down = f"its process was lost: {why}"
        self._stats, self._beat = SchedulerStats(), None
        self.changed(False)
        if self.adapters is not None:
            self.adapters.lost()
        self._requests.lose(why)

    def serve(self) -> None:
        """The process, and those of engines that share experts with it, are ready."""
        self._down = None
        self.changed(True)

    def fail(self, why: str) -> None:
        """Fail for good."""
        self._down = why
        if self.adapters is not None:  # it may have served again already, for a moment
            self.adapters.lost()
        self.failed.set_result(why)

    async def close(self) -> None:
        """To be called after the supervisor's `close`."""
        self.lose("it is closed")
        if self._process is not None:
            self._process.connection.send(wire.Close())
            await self._process.end()

    # --- messages ----------------------------------------------------------------------------

    def _send(self, message: wire.Message) -> None:
        if self._process is not None:
            self._process.connection.send(message)

    def _received(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Text():
                self._requests.take_text(message)
            case wire.Output():
                self._requests.take(message)
            case wire.Record():
                self._record(message)
            case wire.Accepted(request_id, error):
                self._requests.settle(request_id, error)
            case wire.Beat():
                self._take_beat(message)
            case wire.Done(number, error):
                if self.adapters is not None:
                    self.adapters.done(number, error)
            case wire.Ready():
                self.ready, self._stats = message, message.stats
                if self._starting is not None and not self._starting.done():
                    self._starting.set_result(None)
            case wire.Failed(error):
                if self._starting is not None and not self._starting.done():
                    self._starting.set_exception(error.error)
                elif self._process is not None:
                    self._process.lose(error.text)

    def _record(self, message: wire.Record) -> None:
        self._stats = message.stats
        self.recorder.record(message.stats, message.iteration)

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

    async def submit(self, given: Submission) -> None:
        """As `EngineCore.submit`."""
        if self._down is not None:
            raise EngineDeadError(f"engine {self.rank}: {self._down}")
        await self._requests.submit(given, given.params or self.input_processor.default_params({}))

    def abort(self, request_id: str, cause: AbortCause) -> None:
        self._requests.abort(request_id, cause)

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

    def ranks(self) -> list[RankStats]:
        """The ranks as of the last beat."""
        if self._beat is not None:
            return self._beat.ranks
        sizes = self._args["tensor_parallel_size"], self._args["pipeline_parallel_size"]
        return [RankStats(rank, is_up=False) for rank in range(math.prod(sizes))]

    def stats(self) -> SchedulerStats:
        return self._stats

    def picture(self, pages_per_cell: int) -> str:
        """The last beat's picture: of its cells those next to the ones asked for."""
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
        self._requests.check_idle()

    def reset_prefix_cache(self) -> None:
        if self._down is None:  # else it has none, or will have an empty one
            self._send(wire.ResetPrefixCache())
