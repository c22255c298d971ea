"""A server for benchmarks in this process, and a worker for it whose device only takes time.

The worker packs its steps and waits for them as the real one does, and gives random words.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import torch
from aiohttp import web

from asyncllm.cache_group import CacheGroup
from asyncllm.config import EngineArgs, EngineConfig
from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.server.app import build_app
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.listener import Listener
from asyncllm.server.serve import patient_collector
from asyncllm.server.service import SERVICE, Service
from asyncllm.step_plan import StepKind, StepPlan, StepShape
from asyncllm.types import DeviceTimes, LaunchedStep, StepResult
from asyncllm.worker.event_waiter import EventWaiter
from asyncllm.worker.memory import MemoryPlan
from asyncllm.worker.step_packer import StepPacker
from asyncllm.worker.work_counts import WorkCounts


class SimulatedEvent:
    """Has the methods of a CUDA event that `executor` uses."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s

    def query(self) -> bool:
        return time.perf_counter() >= self.due_s

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.due_s - time.perf_counter()))


class SimulatedStep:
    """Its tokens, `step_s` after the end of the step before."""

    def __init__(
        self,
        tokens: torch.Tensor,
        event: SimulatedEvent,
        waiter: EventWaiter,
        step_s: float,
        shape: StepShape,
    ) -> None:
        self.event = event
        self._step_s, self._shape = step_s, shape
        self._tokens, self._waiter = tokens, waiter
        self._submitted_s = time.perf_counter()

    async def wait(self) -> StepResult:
        await self._waiter.wait(self.event, self._submitted_s, self._shape)
        return StepResult(self._tokens.tolist())

    def device_times(self) -> DeviceTimes:
        return DeviceTimes(self.event.due_s - self._step_s, self.event.due_s)


class SimulatedWorker:
    """Has the methods of a `Worker` that the engine uses; packs its steps, gives random words."""

    swap_cost = None
    step_cost = None
    prefill_graph_sizes = ()
    runs_on_host = False
    num_pending_graphs = 0
    adapters = None
    group = None
    backend_name = "none"
    num_graphs = 0
    step_s = 0.0
    prefill_step_s: float | None = None  # of a step with prompt tokens; None: as of any other

    def __init__(
        self, config: EngineConfig, *, progress: bool = False, imported: Callable[[], object]
    ) -> None:
        imported()
        window = config.model.context_window
        pages = config.max_num_seqs * -(-window // config.block_size)
        self.memory = MemoryPlan(pages, 0, window, (CacheGroup(config.block_size),))
        self.phases: dict[str, float] = {}
        self.work = WorkCounts()
        self.packer = StepPacker(config.num_slots, config.block_size)
        self.in_flight: deque[SimulatedStep] = deque()
        self._tokens = _random_words(config)
        self._next = 0  # of _tokens
        self._free_s = 0.0  # when the device will be
        self._waiter = EventWaiter()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        inputs = self.packer.pack(plan)
        step_s = self.step_s
        if plan.prefills and self.prefill_step_s is not None:
            step_s = self.prefill_step_s
        self._free_s = max(self._free_s, time.perf_counter()) + step_s
        kind = StepKind.of(len(plan.decodes), plan.num_tokens - len(plan.decodes))
        shape = StepShape(kind, plan.num_tokens)
        tokens = self._words(len(inputs.sampled_slots))
        step = SimulatedStep(tokens, SimulatedEvent(self._free_s), self._waiter, step_s, shape)
        self.in_flight.append(step)
        return step

    def _words(self, number: int) -> torch.Tensor:
        self._next = (self._next + 997) % (len(self._tokens) - number)
        return self._tokens[self._next : self._next + number]

    def drain(self) -> None:
        time.sleep(max(0.0, self._free_s - time.perf_counter()))

    def close(self) -> None:
        self._waiter.close()


@asynccontextmanager
async def running_server(
    engine_args: EngineArgs,
) -> AsyncIterator[tuple[AsyncLLMEngine, Service, int]]:
    """The engine, its server's service and port."""
    engine = AsyncLLMEngine.from_engine_args(engine_args)
    await engine.start()
    server_args = ServerArgs(port=0)
    app = build_app(engine, server_args)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    listener = Listener.bind(server_args)
    await listener.start(runner)
    assert listener.sock is not None
    try:
        with patient_collector(app[SERVICE]):
            yield engine, app[SERVICE], listener.sock.getsockname()[1]
    finally:
        await runner.cleanup()
        await engine.aclose()


def _random_words(config: EngineConfig) -> torch.Tensor:
    """int32 ids of tokens that show plain text."""
    assert config.tokenizer_path is not None
    tokenizer = Tokenizer.from_folder(config.tokenizer_path, None)
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    words = [i for i, text in texts.items() if text and text.isascii()]
    return torch.from_numpy(np.random.default_rng(0).choice(words, 1 << 16).astype(np.int32))
