"""An engine in a process of its own: `AsyncLLMEngine` behind a socket, for as long as that is open.

Started by `RemoteCore` with its end of the socket; it ends with its parent, however that ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from typing import Any

import uvloop

from asyncllm.child_process import given_socket, other_sockets
from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.data_parallel import wire
from asyncllm.engine.data_parallel.connection import Connection
from asyncllm.engine.data_parallel.links import EngineLink
from asyncllm.engine.snapshot import MAX_PAGE_CELLS
from asyncllm.engine.stats import IterationStats, SchedulerStats
from asyncllm.errors import EngineDeadError
from asyncllm.outputs import RequestOutput

logger = logging.getLogger("asyncllm")

BEAT_SECONDS = 1.0
YOUNG_OBJECTS = 100_000  # before a collection: requests leave nothing for one


class EngineServer:
    """One engine for one connection. `ended` has a result when the process may end."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connection = Connection(wire.ToEngine, self._received, self._lost)
        self._engine: AsyncLLMEngine | None = None
        self._is_ready = False
        self._tasks: set[asyncio.Task[None]] = set()

    # --- messages ----------------------------------------------------------------------------

    def _received(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Start():
                self._spawn(self._start(message))
            case wire.Close():
                self._end()
            case _ if not self._is_ready:
                logger.error("%s came before the engine was ready", type(message).__name__)
            case wire.Submit():
                self._spawn(self._submit(message))
            case wire.Abort(request_id, cause):
                self.engine.abort(request_id, cause)
            case wire.AddAdapter():
                self._spawn(self._add_adapter(message))
            case wire.RemoveAdapter(name):
                self._spawn(self.engine.remove_lora(name))
            case wire.PinAdapter(name):
                self._spawn(self.engine.pin_lora(name))
            case wire.ResetPrefixCache():
                self.engine.reset_prefix_cache()

    def _lost(self, why: str) -> None:
        """Nobody wants anything any more."""
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def engine(self) -> AsyncLLMEngine:
        assert self._engine is not None, "the first message is Start"
        return self._engine

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- its life ----------------------------------------------------------------------------

    async def _start(self, given: wire.Start) -> None:
        logging.basicConfig(
            level=given.log_level,
            format=f"%(asctime)s %(levelname)s engine {given.rank}: %(message)s",
        )
        try:
            self._engine = engine = AsyncLLMEngine(**given.args)
            if given.place is not None:
                engine.share_experts(EngineLink.of(given.place, other_sockets()))
            await engine.start()
        except Exception as error:
            self._fail(error)
            return
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        self._is_ready = True
        engine.stat_loggers.append(self)
        stats = engine.stats()
        self.connection.send(wire.Ready(engine.startup, engine.max_model_len, stats))
        self._spawn(self._beat(max(-(-stats.num_pages // MAX_PAGE_CELLS), 1)))
        self._fail(EngineDeadError(await engine.wait_failed()))

    def _fail(self, error: Exception) -> None:
        self.connection.send(wire.Failed(wire.Error.of(error)))
        self.connection.flush()
        self._end()

    async def _beat(self, pages_per_cell: int) -> None:
        engine = self.engine
        (replica,) = engine.replicas
        recorder = replica.recorder
        while True:
            running, waiting = engine.lora_activity()
            work = replica.work
            totals = {
                "host_seconds": recorder.host_seconds,
                "loop_lag": (recorder.loop_lag.counts.tolist(), recorder.loop_lag.total),
                "work": ([[*kind, n] for kind, n in work.steps.items()], work.num_tokens,
                         work.num_padding),
            }  # fmt: skip
            self.connection.send(
                wire.Beat(
                    engine.health(), engine.stats(), replica.picture(pages_per_cell),
                    pages_per_cell, running, waiting, totals, list(replica.ranks()),
                )
            )  # fmt: skip
            await asyncio.sleep(BEAT_SECONDS)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._engine is not None:
            await self._engine.aclose()
        self.connection.close()

    # --- requests ----------------------------------------------------------------------------

    async def _submit(self, given: wire.Submit) -> None:
        name = given.request_id

        def sink(output: RequestOutput) -> None:
            self.connection.send(_output(output))

        def text_sink(text: str, num_tokens: int) -> None:
            self.connection.send(wire.Text(name, text, num_tokens))

        error = None
        try:
            await self.engine.add_request(
                name,
                given.prompt,
                wire.params_from_wire(given.params),
                sink,
                text_sink=text_sink if given.takes_text else None,
                priority=given.priority,
                cache_salt=given.cache_salt,
                lora_request=None if given.adapter is None else given.adapter.request,
            )
        except Exception as refused:
            error = wire.Error.of(refused)
        self.connection.send(wire.Accepted(name, error))

    async def _add_adapter(self, given: wire.AddAdapter) -> None:
        error = None
        try:
            await self.engine.add_lora(given.adapter.request, load_inplace=given.reload)
        except Exception as refused:
            error = wire.Error.of(refused)
        self.connection.send(wire.Done(given.number, error))

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        """As a `StatLogger`."""
        self.connection.send(wire.Record.of(scheduler, iteration))


def _output(output: RequestOutput) -> wire.Output:
    prompt_logprobs = output.prompt_logprobs
    return wire.Output(
        output.request_id,
        output.outputs,
        output.finished,
        output.metrics,
        output.num_cached_tokens,
        output.num_unreturned_tokens,
        None if prompt_logprobs is None else list(prompt_logprobs),
        None if output.error is None else wire.Error.of(output.error),
    )


async def serve(connected: socket.socket) -> None:
    loop, server = asyncio.get_running_loop(), EngineServer()
    await loop.create_unix_connection(lambda: server.connection, sock=connected)
    await server.ended
    await server.close()


if __name__ == "__main__":
    uvloop.run(serve(given_socket()))
