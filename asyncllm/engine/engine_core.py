"""A started engine: its parts, the task that runs its steps, and recovery from failures.

    AsyncLLMEngine -> InputProcessor -> Scheduler -> Worker -> Scheduler -> OutputProcessor -> sink

`LiveRequests` knows which requests are live and how each ends. If a step fails, the requests that
had begun end with an error and the engine goes on, unless the device is lost: then the engine is
dead. If a rank is lost, all requests end with an error and a new worker with all ranks is started,
a limited number of times. Meanwhile the engine refuses requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.engine.adapter import Adapter
from asyncllm.engine.adapters import AdapterManager
from asyncllm.engine.arrival import Submission
from asyncllm.engine.beam_search import BeamSearchClient
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.core import Replica, Restarts
from asyncllm.engine.data_parallel.peers import Peers, SharedAdapterStore
from asyncllm.engine.engine_steps import EngineSteps
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.lockstep_pipeline import run_ahead_in_lockstep, run_synchronous_in_lockstep
from asyncllm.engine.lockstep_steps import LockstepEngineSteps
from asyncllm.engine.output_state import Sink, TextSink
from asyncllm.engine.pipeline import run_ahead, run_staged, run_synchronous
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.state_pool import StatePool
from asyncllm.engine.stats import AbortCause, SchedulerStats, StatLogger
from asyncllm.engine.watchdog import Watchdog
from asyncllm.errors import EngineDeadError, InvalidRequestError, LoRALoadError, QueueFullError
from asyncllm.host import in_own_thread
from asyncllm.lora import LoRARequest
from asyncllm.mesh_config import RankStats
from asyncllm.types import Request
from asyncllm.worker.ranks.group import RankLostError
from asyncllm.worker.worker import Worker

logger = logging.getLogger("asyncllm")

PEERS_SECONDS = 0.1  # after a failed step, until it is known whether another engine was lost


class EngineCore:
    """Must be created on the event loop that it runs on."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        input_processor: InputProcessor,
        recorder: Recorder,
        stat_loggers: list[StatLogger],
        reload: Callable[[], Awaitable[Worker]] | None = None,
        peers: Peers | None = None,
    ) -> None:
        """reload: starts another worker after a rank was lost; None: that is not possible. peers:
        the engines that this one shares experts with."""
        self.worker, self.work = worker, worker.work
        self.input_processor = input_processor
        self.recorder = recorder
        self._config = config
        self.chunk_policy = ChunkPolicy.choose(
            config.chunked_prefill_size, worker.step_cost, worker.prefill_graph_sizes
        )
        self.live = LiveRequests(
            self._new_scheduler(SchedulerStats()),
            input_processor.tokenizer,
            recorder.aborts,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            max_queue_seconds=config.max_queue_seconds,
        )
        self.watchdog = Watchdog(
            config.watchdog_timeout,
            lambda: self.live.scheduler.num_requests,
            lambda: str(self.live.scheduler.stats()),
        )
        self._peers = peers
        self.adapters = None
        if worker.adapters is not None:
            store = worker.adapters
            self.adapters = AdapterManager(
                store if peers is None else SharedAdapterStore(store, peers)
            )
        parts = worker, self.live, self.watchdog, recorder, stat_loggers
        later = [input_processor.grammars.prepare] * 2
        if peers is None:
            self.steps = EngineSteps(*parts, later=later)
        else:
            patience = config.distributed_timeout_seconds
            self.steps = LockstepEngineSteps(peers.lockstep, patience, *parts, later=later)
        self.dead: str | None = None  # why no request is served, for good or until a restart
        self.changed: Callable[[bool], object] = lambda is_up: None  # called at a restart
        self._reload, self._restarts = reload, Restarts()
        self._closing: asyncio.Task[None] | None = None  # closes the worker
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="asyncllm engine")
        self._watch_ranks()

    # --- requests ----------------------------------------------------------------------------

    async def submit(self, given: Submission) -> None:
        """Validate, tokenise and queue a request, unless it is aborted meanwhile. A refused request
        holds nothing. Raises `InvalidRequestError`, `QueueFullError`, `EngineDeadError`."""
        request_id = given.arrival.request_id
        self._check_open(request_id)
        request = await self.input_processor.process(
            request_id,
            given.prompt,
            given.params or self.input_processor.default_params({}),
            time.monotonic(),
            given.priority,
            given.cache_salt,
        )
        adapter, receive = None, given.sink
        if given.lora_request is not None:
            adapter = await self._acquire_adapter(request, given.lora_request, adds=given.adds_lora)
            request.use_adapter(adapter.slot, adapter.content)
            receive = self.lora.releasing(adapter, given.sink)
        try:
            if not given.arrival.is_aborted:
                self._check_open(request_id, len(request.prompt_token_ids))  # may have changed
                self.add(request, receive, given.text_sink)
                adapter = None  # the request's end releases it
        finally:
            if adapter is not None:
                self.lora.release(adapter)

    def _check_open(self, request_id: str, num_tokens: int = 0) -> None:
        """Raises `EngineDeadError`, `QueueFullError`."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        self.live.check_room(request_id, num_tokens)

    def add(self, request: Request, sink: Sink, text_sink: TextSink | None) -> None:
        """Raises `InvalidRequestError`, also if a request with this id is live."""
        params = request.sampling_params
        if self._config.logits_processors:
            request.batch_processors = self.worker.processors.needed_by(params)
        if params.use_beam_search:
            seq_ids = list(islice(self.input_processor.seq_ids, params.num_sequences))
            record = partial(self.steps.record, None)
            search = BeamSearchClient(request, seq_ids, self.live, sink, record)
            self.live.add(request, search.receive, None)
            search.ask()
        else:
            self.live.add(request, sink, text_sink)
        self.steps.wake()

    def abort(self, request_id: str, cause: AbortCause) -> None:
        if self.live.abort(request_id, cause):
            self.steps.record(None)

    async def _acquire_adapter(
        self, request: Request, wanted: LoRARequest, *, adds: bool
    ) -> Adapter:
        """Load an adapter into a device slot, until it is released. adds: register it if unknown.

        A request that waits for a slot is counted, and times out, as if it waited for its first
        step. Raises `InvalidRequestError`, `QueueFullError`.
        """
        limit = self._config.max_queue_seconds
        try:
            with self.live.waiting(request):
                async with asyncio.timeout(limit if limit < math.inf else None):
                    return await self.lora.acquire(wanted, adds=adds)
        except TimeoutError:
            raise QueueFullError(
                f"request {request.request_id}: waited for a slot of its adapter over "
                f"max_queue_seconds ({limit:g})"
            ) from None
        except LoRALoadError as error:
            raise InvalidRequestError(str(error), "lora_request") from error

    @property
    def lora(self) -> AdapterManager:
        """Raises `InvalidRequestError` where the engine serves no adapters."""
        if self.adapters is None:
            raise InvalidRequestError("this engine was started without enable_lora", "lora_request")
        return self.adapters

    # --- views -------------------------------------------------------------------------------

    @property
    def startup(self) -> dict[str, Any]:
        """The settings that the start chose, and the seconds of its phases. Raises
        `EngineDeadError` during a restart."""
        if self._closing is not None:
            raise EngineDeadError(str(self.dead))
        config, worker = self._config, self.worker
        return {
            "model": str(config.model.path),
            "architecture": config.model.architecture,
            "device": config.device,
            "dtype": config.dtype,
            "attention_backend": worker.backend_name,
            "max_model_len": worker.memory.max_model_len,
            "prefill_chunk_tokens": self.chunk_policy.chunk_tokens,
            "kv_pages": worker.memory.num_pages,
            "host_pages": worker.memory.num_host_pages,
            "decode_graphs": worker.num_graphs,
            "decode_graphs_to_follow": worker.num_pending_graphs,
            "decode_kernels": worker.decode_kernels or None,
            "seconds": {name: round(seconds, 3) for name, seconds in worker.phases.items()},
        }

    def health(self) -> str | None:
        """None if requests are served, else the reason why not."""
        return self.dead or self.watchdog.stalled

    def stats(self) -> SchedulerStats:
        return self.live.scheduler.stats()

    def ranks(self) -> list[RankStats]:
        group = self.worker.group
        return [RankStats(0), *(() if group is None else group.stats())]

    def picture(self, pages_per_cell: int) -> str:
        """The state of the pages, as letters: see `snapshot.Pages`."""
        return self.live.scheduler.blocks.device.picture(pages_per_cell)

    def observe(self) -> None:
        """Record the steps whose output is already with clients."""
        self.steps.observe()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return (self,)

    def check_integrity(self) -> None:
        self.live.scheduler.check_integrity()

    def check_idle(self) -> None:
        self.live.check_empty()

    def reset_prefix_cache(self) -> None:
        self.live.scheduler.blocks.reset_prefix_cache()

    # --- its task ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while self.dead is None:
            try:
                if isinstance(self.steps, LockstepEngineSteps):
                    await self._run_in_lockstep(self.steps)
                elif not self._config.async_scheduling:
                    await run_synchronous(self.steps)
                elif self._config.mesh.pp > 1:
                    await run_staged(self.steps, len(self.live.scheduler.sets))
                else:
                    await run_ahead(self.steps)
            except Exception as error:
                logger.exception("a step failed; the requests that had begun end with an error")
                await self._recover(error)

    async def _run_in_lockstep(self, steps: LockstepEngineSteps) -> None:
        """If a step fails, the engine dies: the other engines wait in that step."""
        is_ahead = self._config.async_scheduling
        run = run_ahead_in_lockstep if is_ahead else run_synchronous_in_lockstep
        try:
            await run(steps)
        except Exception as error:
            if steps.is_planning:  # no engine waits yet
                raise
            logger.exception("a step of all engines failed")
            await asyncio.sleep(PEERS_SECONDS)
            self._die(steps.lost or f"a step failed: {error}")

    async def _recover(self, error: Exception) -> None:
        """End the requests that a failed step affects. Go on if the device responds, else die.

        Requests that wait for their first step are kept, unless planning failed: then one of them
        may be the cause.
        """
        self.steps.reset()
        self.live.restart(
            self._new_scheduler(self.live.scheduler.stats()),
            f"the engine failed in a step: {error}",
            keep_queued=not self.steps.is_planning,
        )
        self.steps.record(None)
        try:
            await in_own_thread(self.worker.drain)
        except RankLostError as lost:  # the group's own notice may come later
            self._lose_rank(str(lost))
        except Exception as lost:
            self._die(f"the device is lost: {lost}")

    def _die(self, reason: str) -> None:
        if not self.failed.done():
            logger.critical("%s", reason)
            self.dead = reason
            self.live.fail_all(reason)
            self.failed.set_result(reason)

    # --- lost ranks --------------------------------------------------------------------------

    def _watch_ranks(self) -> None:
        group, loop = self.worker.group, asyncio.get_running_loop()

        def lose(reason: str) -> None:
            if group is self.worker.group:  # else it is replaced already, after a failed step
                self._lose_rank(reason)

        if group is not None:
            group.on_failure(lambda why: loop.call_soon_threadsafe(lose, why))

    def _lose_rank(self, reason: str) -> None:
        """A rank is lost, and with it its shard of all pages: end all requests, then restart."""
        if self.dead is not None:
            return
        self._task.cancel()
        if self._reload is None or not self._restarts.may_start():
            self._die(reason)
            return
        logger.error("%s; the ranks are started again", reason)
        self.dead = f"{reason}; the ranks are being started again"
        self.live.fail_all(self.dead)
        self.changed(False)
        self._task = asyncio.create_task(self._restart(self._task, self._reload, reason))

    async def _restart(
        self, steps: asyncio.Task[None], reload: Callable[[], Awaitable[Worker]], reason: str
    ) -> None:
        try:
            await asyncio.wait([steps])
            if self.adapters is not None:  # fails the requests that wait for a slot
                await self.adapters.close()
            await asyncio.shield(self._close_worker())
            await self._adopt(await reload())
        except Exception as error:
            logger.exception("the ranks cannot be started again")
            self._die(f"{reason}; and then: {error}")
            return
        logger.warning("all ranks serve again")
        self.dead = None
        self.changed(True)
        await self._run()

    async def _adopt(self, worker: Worker) -> None:
        """Switch to a new worker, with empty pages, and load the same adapters, but those whose
        files are no longer there. Raises `ValueError` if its context window is smaller than the one
        that clients know."""
        self.worker = self.steps.worker = worker
        self.work, self._closing = worker.work, None
        if worker.memory.max_model_len < self.input_processor.max_model_len:
            raise ValueError(f"its max_model_len is {worker.memory.max_model_len}")
        self.steps.reset()
        scheduler = self._new_scheduler(self.live.scheduler.stats())
        self.live.restart(scheduler, "the ranks were started again", keep_queued=False)
        if self.adapters is not None and worker.adapters is not None:
            before, self.adapters = self.adapters, AdapterManager(worker.adapters)
            for request in before.requests:
                try:
                    await self.adapters.add(request)
                except LoRALoadError as error:  # of one adapter: the engine serves without it
                    logger.error("adapter %s is not loaded again: %s", request.lora_name, error)
        self._watch_ranks()

    def _close_worker(self) -> asyncio.Task[None]:
        """The task that closes the worker; later calls return the same task."""
        if self._closing is None:
            self._closing = asyncio.create_task(in_own_thread(self.worker.close))
        return self._closing

    def _new_scheduler(self, totals: SchedulerStats) -> Scheduler:
        config, memory, states = self._config, self.worker.memory, None
        if memory.has_states:
            states = StatePool(config.num_slots, memory.num_snapshots, memory.num_host_states)
        blocks = BlockManager(
            memory.num_pages,
            config.block_size,
            memory.num_host_pages,
            config.enable_prefix_caching,
            memory.groups,
            states,
        )
        return Scheduler(
            blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunk_policy=self.chunk_policy,
            policy=config.scheduling_policy,
            preemption_mode=config.preemption_mode,
            swap_cost=self.worker.swap_cost,
            totals=totals,
            num_sets=config.mesh.pp if config.async_scheduling else 1,
        )

    async def close(self) -> None:
        self.dead = "the engine is closed"
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._peers is not None:
            self._peers.close()
        self.live.fail_all(self.dead)
        self.steps.record(None)
        if self.adapters is not None:
            await self.adapters.close()
        self.input_processor.close()
        self.watchdog.close()
        await self.steps.close()
        await self._close_worker()
