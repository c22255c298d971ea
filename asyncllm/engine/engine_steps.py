"""The verbs of a step on the real parts: scheduler, worker, live requests, clients, observers.

`pipeline` says when each is called, and the clock here how long it took. Observers (metrics,
loggers) hear of a step a turn of the loop after its clients. It does not know how requests come in,
nor what becomes of a step that fails: that is `EngineCore`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from asyncllm.engine.constraints import constrain
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.non_finite import end_without_token
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import StatLogger, StepRecord
from asyncllm.engine.step_clock import LoopLag, StepClock
from asyncllm.engine.watchdog import Watchdog
from asyncllm.host import in_own_thread
from asyncllm.step_plan import StepPlan
from asyncllm.types import LaunchedStep, StepResult
from asyncllm.worker.executor import HostStep
from asyncllm.worker.packed_step import NO_ROWS
from asyncllm.worker.ranks.messages import CaptureGraph
from asyncllm.worker.worker import Worker

logger = logging.getLogger("asyncllm")

QUIET_SECONDS = 0.25  # without a request, before graphs are captured
PAUSE_SECONDS = 0.01  # between two captures: HTTP gets its turn
LONG_QUIET_SECONDS = 2.0  # before what holds the loop for half a second
TIMER_SECONDS = 1e-3  # that timers count in: what is less is waited for in turns of the loop


class EngineSteps:
    """Implements `pipeline.Steps`. Made on the loop that it runs on.

    `later`: work that no start waits for, after the graphs, each part for seconds of quiet.
    """

    def __init__(
        self,
        worker: Worker,
        live: LiveRequests,
        watchdog: Watchdog,
        recorder: Recorder,
        stat_loggers: list[StatLogger],
        later: Iterable[Callable[[], None]] = (),
    ) -> None:
        self.worker = worker
        self._live = live
        self._watchdog = watchdog
        self._recorder = recorder
        self._host_seconds = recorder.host_seconds
        self._stat_loggers = stat_loggers
        self._later = deque(later)
        self._lag = LoopLag(recorder.loop_lag.observe)
        self.clock = StepClock()
        self._plan_started = 0.0
        self.is_planning = False  # left true by a plan that raised
        self._pending_emit: StepPlan | None = None  # finished, and not emitted
        self._pending_observe: deque[StepPlan] = deque()  # emitted, and not observed
        self._work = asyncio.Event()
        self._constrain_thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-constrain")

    def wake(self) -> None:
        """A request is there: who idles plans."""
        self._work.set()

    def reset(self) -> None:
        """Forget the steps under way, which failed. What was emitted is observed."""
        self.observe()
        self.clock.reset()
        self._pending_emit = None

    async def close(self) -> None:
        """No step runs any more."""
        self._lag.close()
        await in_own_thread(self._constrain_thread.shutdown)

    # --- the verbs -----------------------------------------------------------------------------

    async def wait_to_plan(self) -> None:
        """Let requests that arrive now be in the next plan, as long as the device is busy.

        Turns of the loop would keep the GIL from steps that need it: there it is rather too early.
        """
        now = time.monotonic()
        until = now + self.clock.seconds_to_plan(now)
        least = TIMER_SECONDS if self.worker.runs_on_host else 0.0
        while (seconds := until - time.monotonic()) > least:  # noqa: ASYNC110
            await asyncio.sleep(max(seconds - TIMER_SECONDS, 0))

    def plan(self) -> StepPlan | None:
        start = self._plan_started = time.monotonic()
        self._live.expire(start)
        self.is_planning = True
        plan = self._live.scheduler.plan()
        self.is_planning = False
        if plan is not None:
            self._live.planned(plan)
        self._host_seconds["plan"] += time.monotonic() - start
        return plan

    def launch(self, plan: StepPlan) -> LaunchedStep:
        start = time.monotonic()
        launched = self.worker.launch(plan)
        now = time.monotonic()
        self.clock.launched(launched, now - self._plan_started)
        self._host_seconds["launch"] += now - start
        self._live.scheduler.publish_planned()  # now that the device is at work
        return launched

    async def constrain(self, plan: StepPlan, launched: LaunchedStep) -> None:
        """Let grammars and processors speak, off the loop, and launch the sampling with it.

        Clients get their tokens while masks are filled, which needs no GIL: neither waits for the
        other.
        """
        assert isinstance(launched, HostStep)
        loop, filling = asyncio.get_running_loop(), asyncio.Event()
        masks, begun = (
            self.worker.token_masks.host,
            partial(loop.call_soon_threadsafe, filling.set),
        )
        work = loop.run_in_executor(
            self._constrain_thread, partial(constrain, plan, masks, launched.sample, begun)
        )
        work.add_done_callback(lambda _: filling.set())  # also where it raised before
        await filling.wait()
        try:
            self.emit()
        finally:
            constrained = await work
        start = time.monotonic()
        for seq, error in constrained.failures:
            self._live.fail_sequence(seq, "its grammar failed", error)
        self._live.jump_forward(constrained.forced)
        self._host_seconds["finish"] += time.monotonic() - start
        self._host_seconds["constrain"] += constrained.seconds

    async def end(self, plan: StepPlan, launched: LaunchedStep) -> None:
        if plan.needs_host:
            await self.constrain(plan, launched)
        elif isinstance(launched, HostStep):
            launched.sample(NO_ROWS)

    def finish(self, plan: StepPlan, result: StepResult) -> None:
        start = time.monotonic()
        self._watchdog.step_done()
        self._pending_emit = plan
        end_without_token(plan, result, self._live, self.worker)
        for row, error in result.failures.items():
            self._live.fail_sequence(plan.sampled[row], "its logits processor failed", error)
        self._live.take(plan, result)
        self._host_seconds["finish"] += time.monotonic() - start

    def emit(self) -> None:
        """Give clients the tokens of the step that was finished, if they have not got them yet.

        Observers hear of it in the loop's next turn: first come the bytes that clients wait for.
        """
        start = time.monotonic()
        self._live.emit()
        if self._pending_emit is not None:
            self._pending_observe.append(self._pending_emit)
            self._pending_emit = None
            asyncio.get_running_loop().call_soon(self.observe)
        self._host_seconds["finish"] += time.monotonic() - start

    def observe(self) -> None:
        """Record now the steps that would be recorded in the loop's next turn."""
        if not self._pending_observe:
            return
        start = time.monotonic()
        while self._pending_observe:
            self.record(self._timed(self._pending_observe.popleft()))
        self._lag.watch()
        self._host_seconds["finish"] += time.monotonic() - start

    def _timed(self, plan: StepPlan) -> StepRecord | None:
        """None where its times cannot be read: if the device is lost, the next step will say so."""
        try:
            return self.clock.finished(plan)
        # What only watches must end no request, nor reach who asks for a snapshot.
        except Exception:
            logger.exception("the times of step %d cannot be read", plan.step_id)
            return None

    def record(self, step: StepRecord | None) -> None:
        """Give the observers what came since the last time."""
        iteration = self._live.outputs.take_iteration_stats()
        iteration.step = step
        stats = self._live.scheduler.stats()
        self._recorder.record(stats, iteration)
        for stat_logger in list(self._stat_loggers):
            try:
                stat_logger.record(stats, iteration)
            except Exception:  # it only watches: no request may end for it
                logger.exception("%r failed, and gets no more records", stat_logger)
                self._stat_loggers.remove(stat_logger)

    async def idle(self) -> None:
        """Until a request arrives. While none does, what was left for later."""
        self._work.clear()
        self.clock.idle()
        if not self._live.scheduler.waiting and await self._stays_quiet():
            await self._work.wait()

    async def _stays_quiet(self) -> bool:
        """Until nothing is left for later; false if a request arrives before."""
        patience = QUIET_SECONDS
        while self.worker.num_pending_graphs:
            if not await self._is_quiet_for(patience):
                return False
            self.worker.command(CaptureGraph())
            patience = PAUSE_SECONDS
        while self._later:
            if not await self._is_quiet_for(LONG_QUIET_SECONDS):
                return False
            self._later.popleft()()
        return True

    async def _is_quiet_for(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._work.wait()
        except TimeoutError:
            return not self._live.scheduler.waiting
        return False
