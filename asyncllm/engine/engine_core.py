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
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.engine.adapters import AdapterManager
from asyncllm.engine.admission import Admission
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.core import Replica, Restarts
from asyncllm.engine.data_parallel.peers import Peers, SharedAdapterStore
from asyncllm.engine.engine_steps import EngineSteps
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.lockstep_pipeline import run_ahead_in_lockstep, run_synchronous_in_lockstep
from asyncllm.engine.lockstep_steps import LockstepEngineSteps
from asyncllm.engine.new_scheduler import new_scheduler
from asyncllm.engine.pipeline import run_ahead, run_staged, run_synchronous
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.stats import AbortCause, SchedulerStats
from asyncllm.engine.watchdog import Watchdog
from asyncllm.errors import EngineDeadError, LoRALoadError
from asyncllm.host import in_own_thread
from asyncllm.lora import LoRARequest
from asyncllm.mesh_config import RankStats
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
        parts = worker, self.live, self.watchdog, recorder
        later = [input_processor.grammars.prepare] * 2
        if peers is None:
            self.steps = EngineSteps(*parts, later=later)
        else:
            patience = config.distributed_timeout_seconds
            self.steps = LockstepEngineSteps(peers.lockstep, patience, *parts, later=later)
        self.admission = Admission(
            config, input_processor, self.live, self.steps, self._new_adapters(worker)
        )
        self.submit = self.admission.submit
        self.changed: Callable[[bool], object] = lambda is_up: None  # called at a restart
        self._reload, self._restarts = reload, Restarts()
        self._closing: asyncio.Task[None] | None = None  # closes the worker
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="asyncllm engine")
        self._watch_ranks()

    # --- requests ----------------------------------------------------------------------------

    def abort(self, request_id: str, cause: AbortCause) -> None:
        if self.live.abort(request_id, cause):
            self.steps.record(None)

    @property
    def lora(self) -> AdapterManager:
        return self.admission.lora

    @property
    def adapters(self) -> AdapterManager | None:
        return self.admission.adapters

    # --- views -------------------------------------------------------------------------------

    @property
    def startup(self) -> dict[str, Any]:
        """The settings that the start chose, and the seconds of its phases. Raises
        `EngineDeadError` during a restart."""
        if self._closing is not None:
            raise EngineDeadError(str(self.admission.dead))
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
        return self.admission.dead or self.watchdog.stalled

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
        while self.admission.dead is None:
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
            self.admission.dead = reason
            self.live.fail_all(reason)
            self.failed.set_result(reason)

    # --- lost ranks --------------------------------------------------------------------------

    def _watch_ranks(self) -> None:
        group, loop = self.worker.group, asyncio.get_running_loop()

        def lose(reason: str) -> None:
            if group is self.worker.group:  # else it is replaced already, after a failed step
                self._lose_rank(reason)

        def tell(reason: str) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lose, reason)

        if group is not None:
            group.on_failure(tell)

    def _lose_rank(self, reason: str) -> None:
        """A rank is lost, and with it its shard of all pages: end all requests, then restart."""
        if self.admission.dead is not None:
            return
        self._task.cancel()
        if self._reload is None or not self._restarts.may_start():
            self._die(reason)
            return
        logger.error("%s; the ranks are started again", reason)
        self.admission.dead = f"{reason}; the ranks are being started again"
        self.live.fail_all(self.admission.dead)
        self.changed(False)
        self._task = asyncio.create_task(self._restart(self._task, self._reload, reason))

    async def _restart(
        self, steps: asyncio.Task[None], reload: Callable[[], Awaitable[Worker]], reason: str
    ) -> None:
        adapters = [] if self.adapters is None else self.adapters.requests
        while True:
            try:
                await _ended(steps)
                if self.adapters is not None:  # fails the requests that wait for a slot
                    await self.adapters.close()
                await asyncio.shield(self._close_worker())
                await self._adopt(await reload(), adapters)
                break
            except Exception as error:
                logger.exception("the ranks have not started")
                reason += f"; and then: {error}"
                if not self._restarts.may_start():
                    self._die(reason)
                    return
        logger.warning("all ranks serve again")
        self.admission.dead = None
        self.changed(True)
        await self._run()

    async def _adopt(self, worker: Worker, adapters: Sequence[LoRARequest]) -> None:
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
            self.admission.adapters = self._new_adapters(worker)
            for request in adapters:
                try:
                    await self.lora.add(request)
                except LoRALoadError as error:  # of one adapter: the engine serves without it
                    logger.error("adapter %s is not loaded again: %s", request.lora_name, error)
        self._watch_ranks()

    def _close_worker(self) -> asyncio.Task[None]:
        """The task that closes the worker; later calls return the same task."""
        if self._closing is None:
            self._closing = asyncio.create_task(in_own_thread(self.worker.close))
        return self._closing

    def _new_adapters(self, worker: Worker) -> AdapterManager | None:
        store = worker.adapters
        if store is None:
            return None
        peers = self._peers
        return AdapterManager(store if peers is None else SharedAdapterStore(store, peers))

    def _new_scheduler(self, totals: SchedulerStats) -> Scheduler:
        worker = self.worker
        memory, swap_cost = worker.memory, worker.swap_cost
        return new_scheduler(self._config, memory, self.chunk_policy, swap_cost, totals)

    async def close(self) -> None:
        self.admission.dead = "the engine is closed"
        self._task.cancel()
        await _ended(self._task)
        if self._peers is not None:
            self._peers.close()
        self.live.fail_all(self.admission.dead)
        self.steps.record(None)
        if self.adapters is not None:
            await self.adapters.close()
        self.input_processor.close()
        self.watchdog.close()
        await self.steps.close()
        await self._close_worker()


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for a cancelled task, and clear its frames: a step in one of them keeps a closed
    worker's memory."""
    await asyncio.wait([task])
    try:
        task.result()
    except asyncio.CancelledError as cancelled:
        traceback.clear_frames(cancelled.__traceback__)
    except Exception as error:
        logger.exception("the engine's task failed")
        traceback.clear_frames(error.__traceback__)
