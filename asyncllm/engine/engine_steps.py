"""The methods of a step (`pipeline.Steps`), implemented by scheduler, worker and live requests.

`pipeline` decides when each is called; the clock here measures how long it takes. Observers
(metrics, loggers) get a step's record one iteration of the event loop after clients get its tokens.
How requests arrive, and what happens after a failed step, is up to `EngineCore`.
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
from asyncllm.engine.stats import StepRecord
from asyncllm.engine.step_clock import LoopLag, StepClock
from asyncllm.engine.watchdog import Watchdog
from asyncllm.host import in_own_thread
from asyncllm.step_plan import StepPlan
from asyncllm.types import LaunchedStep, StepResult
from asyncllm.worker.executor import HostStep
from asyncllm.worker.packed_step import NO_ROWS
from asyncllm.worker.worker import Worker

logger = logging.getLogger("asyncllm")

QUIET_SECONDS = 0.25  # idle time before the remaining graphs are captured
PAUSE_SECONDS = 0.01  # between two captures, so that HTTP is served
LONG_QUIET_SECONDS = 2.0  # idle time before work that blocks the loop for half a second
TIMER_SECONDS = 1e-3  # resolution of the loop's timers; shorter waits poll


class EngineSteps:
    """Must be created on the event loop that it runs on.

    later: blocking jobs for idle times after the start, run one by one after the graph captures.
    """

    def __init__(
        self,
        worker: Worker,
        live: LiveRequests,
        watchdog: Watchdog,
        recorder: Recorder,
        later: Iterable[Callable[[], None]] = (),
    ) -> None:
        self.worker = worker
        self._live = live
        self._watchdog = watchdog
        self._recorder = recorder
        self._host_seconds = recorder.host_seconds
        self._later = deque(later)
        self._lag = LoopLag(recorder.loop_lag.observe)
        self.clock = StepClock()
        self._plan_started = 0.0
        self.is_planning = False  # stays true if `plan` raises
        self._pending_emit: StepPlan | None = None  # a finished step that is not emitted yet
        self._pending_observe: deque[StepPlan] = deque()  # emitted steps, not observed yet
        self._work = asyncio.Event()
        self._constrain_thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-constrain")

    def wake(self) -> None:
        """End `idle`: there is a request."""
        self._work.set()

    def reset(self) -> None:
        """Forget all steps in flight, after a failure. Emitted steps are observed first."""
        self.observe()
        self.clock.reset()
        self._pending_emit = None

    async def close(self) -> None:
        """To be called when no step runs any more."""
        self._lag.close()
        await in_own_thread(self._constrain_thread.shutdown)

    # --- `pipeline.Steps` ----------------------------------------------------------------------

    async def wait_to_plan(self) -> None:
        """Delay planning while the device is busy, so that requests that arrive now are in the
        plan.

        On the CPU it stops a timer tick early instead of polling, which would take the GIL from the
        thread that runs the step.
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
        self._live.scheduler.publish_planned()  # while the device is busy
        return launched

    async def constrain(self, plan: StepPlan, launched: LaunchedStep) -> None:
        """Fill grammar masks in a thread, and launch the sampling with them.

        Clients get the last step's tokens meanwhile: filling masks does not hold the GIL.
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
        work.add_done_callback(lambda _: filling.set())  # also if it raises before
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
        """Send the finished step's output to clients, unless that is done already.

        Observers get its record in the loop's next iteration, after the bytes that clients wait
        for.
        """
        start = time.monotonic()
        self._live.emit()
        if self._pending_emit is not None:
            self._pending_observe.append(self._pending_emit)
            self._pending_emit = None
            asyncio.get_running_loop().call_soon(self.observe)
        self._host_seconds["finish"] += time.monotonic() - start

    def observe(self) -> None:
        """Record emitted steps now instead of in the loop's next iteration."""
        if not self._pending_observe:
            return
        start = time.monotonic()
        while self._pending_observe:
            self.record(self._timed(self._pending_observe.popleft()))
        self._lag.watch()
        self._host_seconds["finish"] += time.monotonic() - start

    def _timed(self, plan: StepPlan) -> StepRecord | None:
        """None if its times cannot be read. If the device is lost, the next step raises."""
        try:
            return self.clock.finished(plan)
        # A failed measurement must neither end a request nor fail a snapshot.
        except Exception:
            logger.exception("the times of step %d cannot be read", plan.step_id)
            return None

    def record(self, step: StepRecord | None) -> None:
        """Pass all stats since the last call to the observers."""
        iteration = self._live.outputs.take_iteration_stats()
        iteration.step = step
        self._recorder.record(self._live.scheduler.stats(), iteration)

    async def idle(self) -> None:
        """Wait for a request; meanwhile do the work that the start left for later."""
        self._work.clear()
        self.clock.idle()
        if not self._live.scheduler.waiting and await self._stays_quiet():
            await self._work.wait()

    async def _stays_quiet(self) -> bool:
        """Do the deferred work. False as soon as a request arrives."""
        patience = QUIET_SECONDS
        while self.worker.num_pending_graphs:
            if not await self._is_quiet_for(patience):
                return False
            self.worker.capture_graph()
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
