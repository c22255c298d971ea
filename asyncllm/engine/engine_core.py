"""A started engine: its parts, and the task that runs the steps.

    AsyncLLMEngine -> InputProcessor -> Scheduler -> Worker -> Scheduler -> OutputProcessor -> sink

Who is live, and how each request ends, is in `LiveRequests`. A step that fails ends the requests
that had begun, each with an error, and the engine goes on; if the device is lost with it, the
engine is dead and says so.
"""

from __future__ import annotations

import asyncio
import logging

from asyncllm.config import EngineConfig
from asyncllm.engine.admission import Admission
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.engine_steps import EngineSteps
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.own_thread import in_own_thread
from asyncllm.engine.pipeline import run_ahead, run_synchronous
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.stats import SchedulerStats, StatLogger
from asyncllm.engine.watchdog import Watchdog
from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import SamplingParams
from asyncllm.worker.worker import Worker

logger = logging.getLogger("asyncllm")


class EngineCore:
    """Made on the loop that it runs on."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        input_processor: InputProcessor,
        recorder: Recorder,
        stat_loggers: list[StatLogger],
    ) -> None:
        self.worker = worker
        self.input_processor = input_processor
        self._config = config
        self.chunk_policy = ChunkPolicy.choose(
            config.chunked_prefill_size, worker.step_cost, worker.prefill_graph_sizes
        )
        self.live = LiveRequests(
            self._new_scheduler(SchedulerStats()),
            Admission(
                config.max_queued_requests, config.max_queued_tokens, config.max_queue_seconds
            ),
            input_processor.tokenizer,
            recorder.aborts,
        )
        self.watchdog = Watchdog(
            config.watchdog_timeout,
            lambda: self.live.scheduler.num_requests,
            lambda: str(self.live.scheduler.stats()),
        )
        self.steps = EngineSteps(
            worker,
            self.live,
            self.watchdog,
            recorder,
            stat_loggers,
            later=[input_processor.grammars.prepare] * 2,
        )
        self.dead: str | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="asyncllm engine")

    # --- requests ----------------------------------------------------------------------------

    def processors_for(self, params: SamplingParams) -> tuple[int, ...]:
        """Raises `InvalidRequestError` where one of the engine's refuses the request."""
        try:
            found = self.worker.processors_for(params)
        except ValueError as error:
            raise InvalidRequestError(
                f"a logits processor: {error}", "logits_processors"
            ) from error
        if found and params.use_beam_search:  # its scores are those of the model
            raise InvalidRequestError(
                "this server's logits processors do not work with beam search", "use_beam_search"
            )
        return found

    # --- its task ----------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = run_ahead if self._config.async_scheduling else run_synchronous
        while self.dead is None:
            try:
                await loop(self.steps)
            except Exception as error:
                logger.exception("a step failed; the requests that had begun end with an error")
                await self._recover(error)

    async def _recover(self, error: Exception) -> None:
        """End the requests that the step may have hurt; go on if the device answers, else be dead.

        Those that still wait for their first step are kept, unless it was planning that failed: the
        first of them may be the reason.
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
        except Exception as lost:
            logger.critical("the device is lost: %s", lost)
            self.dead = f"the device is lost: {lost}"
            self.live.fail_all(self.dead)
            self.failed.set_result(self.dead)

    def _new_scheduler(self, totals: SchedulerStats) -> Scheduler:
        config, memory = self._config, self.worker.memory
        blocks = BlockManager(
            memory.num_pages, config.block_size, memory.num_host_pages, config.enable_prefix_caching
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
        )

    async def close(self) -> None:
        self.dead = "the engine is closed"
        self._task.cancel()
        await asyncio.wait([self._task])
        self.live.fail_all(self.dead)
        self.steps.record(None)
        self.input_processor.close()
        self.watchdog.close()
        await self.steps.close()
        await in_own_thread(self.worker.close)
