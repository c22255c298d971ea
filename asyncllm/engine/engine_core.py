"""A started engine: the parts, the verbs of its steps, and the task that runs them.

    add_request -> InputProcessor -> Scheduler -> Worker -> Scheduler -> OutputProcessor -> sink

Who is live, and how each request ends, is in `LiveRequests`. A step that fails ends the requests
that had begun, each with an error, and the engine goes on; if the device is lost with it, the
engine is dead and says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from asyncllm.config import EngineConfig
from asyncllm.engine.admission import Admission
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.constraints import constrain
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.loop_lag import LoopLag
from asyncllm.engine.non_finite import end_without_token
from asyncllm.engine.output_state import Sink, TextSink
from asyncllm.engine.own_thread import in_own_thread
from asyncllm.engine.pipeline import Launched, run_ahead, run_synchronous
from asyncllm.engine.plan_time import PlanTime
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.stats import AbortCause, SchedulerStats, StatLogger, StepRecord
from asyncllm.engine.step_clock import StepClock
from asyncllm.engine.text.prompt import PromptInput
from asyncllm.engine.watchdog import Watchdog
from asyncllm.errors import EngineDeadError, InvalidRequestError
from asyncllm.sampling_params import SamplingParams
from asyncllm.step_plan import StepPlan
from asyncllm.types import Request, StepResult
from asyncllm.worker.host_step import HostStep
from asyncllm.worker.worker import Worker

logger = logging.getLogger("asyncllm")

QUIET_SECONDS = 0.25  # without a request, before graphs are captured
PAUSE_SECONDS = 0.01  # between two captures: HTTP gets its turn


class EngineCore:
    """Implements `pipeline.Steps`. Made on the loop that it runs on."""

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
        self.clock = StepClock()
        self._plan_time = PlanTime()
        self._plan_started = 0.0
        self._planning = False  # left true by a plan that raised
        self._untold: StepPlan | None = None  # finished, and no client was told of it yet
        self._told: deque[StepPlan] = deque()  # and the observers not yet
        self._recorder = recorder
        self._stat_loggers = stat_loggers
        self._lag = LoopLag(recorder.loop_lag.observe)
        self.watchdog = Watchdog(
            config.watchdog_timeout,
            lambda: self.live.scheduler.num_requests,
            lambda: str(self.live.scheduler.stats()),
        )
        self._constrain_thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-constrain")
        self.dead: str | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="asyncllm engine")

    # --- requests ----------------------------------------------------------------------------

    async def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        sink: Sink,
        priority: int,
        cache_salt: str | None,
        text_sink: TextSink | None = None,
    ) -> Request:
        self._check_open(request_id)
        request = await self.input_processor.process(
            request_id, prompt, params, time.monotonic(), priority, cache_salt
        )
        # Things may have changed while a long prompt was tokenised.
        self._check_open(request_id, len(request.prompt_token_ids))
        request.batch_processors = self._processors_for(params)
        self.live.add(request, sink, text_sink)
        self._work.set()
        return request

    def _processors_for(self, params: SamplingParams) -> tuple[int, ...]:
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

    def _check_open(self, request_id: str, num_tokens: int = 0) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.live.has_request(request_id):
            raise InvalidRequestError(f"request_id {request_id!r} is in use", "request_id")
        self.live.admission.check_room(request_id, num_tokens)

    def abort(self, request_id: str, cause: AbortCause = "application") -> None:
        if self.live.abort(request_id, cause):
            self._record(None)

    # --- the verbs of a step (pipeline.Steps) ------------------------------------------------

    async def linger(self) -> None:
        """Let requests that arrive now be in the next plan, as long as the device is busy."""
        seconds = self._plan_time.seconds_to_wait(time.monotonic())
        if seconds > 0:
            await asyncio.sleep(seconds)

    def plan(self) -> StepPlan | None:
        start = self._plan_started = time.monotonic()
        self.live.expire(start)
        self._planning = True
        plan = self.live.scheduler.plan()
        self._planning = False
        if plan is not None:
            self.live.planned(plan)
        self.clock.host.plan += time.monotonic() - start
        return plan

    def launch(self, plan: StepPlan) -> Launched:
        start = time.monotonic()
        launched = self.worker.launch(plan)
        self.clock.launched(launched)
        now = time.monotonic()
        self.clock.host.launch += now - start
        self._plan_time.planned(now - self._plan_started)
        self.live.scheduler.publish_planned()  # now that the device is at work
        return launched

    async def constrain(self, plan: StepPlan, launched: Launched) -> None:
        """Let grammars and processors speak, off the loop, and launch the sampling with it.

        Clients are told while masks are filled: that needs no GIL, so the two do not wait for each
        other.
        """
        assert isinstance(launched, HostStep)
        loop, filling = asyncio.get_running_loop(), asyncio.Event()
        masks, begun = self.worker.token_masks, partial(loop.call_soon_threadsafe, filling.set)
        work = loop.run_in_executor(
            self._constrain_thread, partial(constrain, plan, masks, launched.sample, begun)
        )
        work.add_done_callback(lambda _: filling.set())  # also where it raised before
        await filling.wait()
        try:
            self.tell()
        finally:
            constrained = await work
        start = time.monotonic()
        for seq, error in constrained.failures:
            self.live.fail_sequence(seq, "its grammar failed", error)
        self.live.jump(constrained.jumps)
        self.clock.host.finish += time.monotonic() - start
        self.clock.host.constrain += constrained.seconds

    def finish(self, plan: StepPlan, result: StepResult) -> None:
        start = time.monotonic()
        self.watchdog.step_done()
        self._untold = plan
        end_without_token(plan, result, self.live, self.worker)
        for row, error in result.failures.items():
            self.live.fail_sequence(plan.sampled[row], "its logits processor failed", error)
        self.live.take(plan, result)
        self.clock.host.finish += time.monotonic() - start

    def tell(self) -> None:
        """Tell clients of the step that was finished, if they were not told yet.

        Observers hear of it in the loop's next turn: first come the bytes that clients wait for.
        """
        start = time.monotonic()
        self.live.tell()
        if self._untold is not None:
            self._told.append(self._untold)
            self._untold = None
            asyncio.get_running_loop().call_soon(self._observe)
        self.clock.host.finish += time.monotonic() - start

    def _observe(self) -> None:
        start = time.monotonic()
        while self._told:
            step = self.clock.finished(self._told.popleft())
            self._plan_time.finished(step)
            self._record(step)
        self._lag.watch()
        self.clock.host.finish += time.monotonic() - start

    def _record(self, step: StepRecord | None) -> None:
        """Tell the observers what came since the last time."""
        iteration = self.live.outputs.take_iteration_stats()
        iteration.step = step
        stats = self.live.scheduler.stats()
        self._recorder.record(stats, iteration)
        for stat_logger in list(self._stat_loggers):
            try:
                stat_logger.record(stats, iteration)
            except Exception:  # it only watches: no request may end for it
                logger.exception("%r failed, and is told no more", stat_logger)
                self._stat_loggers.remove(stat_logger)

    async def idle(self) -> None:
        """Until a request arrives. After a moment of quiet, graphs that were left for later."""
        self._work.clear()
        self.clock.idle()
        self._plan_time.idle()
        patience = QUIET_SECONDS
        while not self.live.scheduler.waiting and self.worker.num_pending_graphs:
            await self._work_within(patience)
            if self.live.scheduler.waiting:
                return
            self.worker.capture_one()
            patience = PAUSE_SECONDS
        if not self.live.scheduler.waiting:
            await self._work.wait()

    async def _work_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._work.wait()

    async def _run(self) -> None:
        loop = run_ahead if self._config.async_scheduling else run_synchronous
        while self.dead is None:
            try:
                await loop(self)
            except Exception as error:
                logger.exception("a step failed; the requests that had begun end with an error")
                await self._recover(error)

    # --- failure and end ---------------------------------------------------------------------

    async def _recover(self, error: Exception) -> None:
        """End the requests that the step may have hurt; go on if the device answers, else be dead.

        Those that still wait for their first step are kept, unless it was planning that failed: the
        first of them may be the reason.
        """
        self.clock.reset()
        self._plan_time.idle()
        self._untold = None
        self._told.clear()
        self.live.restart(
            self._new_scheduler(self.live.scheduler.stats()),
            f"the engine failed in a step: {error}",
            keep_queued=not self._planning,
        )
        self._record(None)
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
        await self.live.rendered()
        self.live.fail_all(self.dead)
        self._record(None)
        self._lag.close()
        self.input_processor.close()
        self.watchdog.close()
        await in_own_thread(self._constrain_thread.shutdown)
        await in_own_thread(self.worker.close)
