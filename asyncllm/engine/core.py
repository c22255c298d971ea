"""The interface of a started engine, as `AsyncLLMEngine` uses it, wherever the engine runs.

`EngineCore` is one in this process, `RemoteCore` one in a process of its own, `EngineGroup` several
of either. All of it is the loop's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from asyncllm.engine.arrival import Submission
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import AbortCause, SchedulerStats
from asyncllm.lora import LoRARequest
from asyncllm.mesh_config import RankStats
from asyncllm.worker.work_counts import WorkCounts

MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 600.0


class Restarts:
    """Starts in place of what was lost. More than MAX_RESTARTS in RESTART_WINDOW_SECONDS say that
    another one does not help."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque()

    def may_start(self) -> bool:
        """Whether another one is within the limit; it is counted."""
        now = time.monotonic()
        while self._starts and self._starts[0] < now - RESTART_WINDOW_SECONDS:
            self._starts.popleft()
        self._starts.append(now)
        return len(self._starts) <= MAX_RESTARTS


class Replica(Protocol):
    """One engine, as observers read it."""

    recorder: Recorder

    def stats(self) -> SchedulerStats: ...

    def picture(self, pages_per_cell: int) -> str: ...

    def observe(self) -> None: ...

    @property
    def work(self) -> WorkCounts: ...

    def health(self) -> str | None: ...

    def ranks(self) -> Sequence[RankStats]:
        """From rank 0 on."""
        ...


class Adapters(Protocol):
    """LoRA adapters by name: see `AdapterManager`."""

    async def add(self, request: LoRARequest, *, reload: bool = False) -> None: ...

    def remove(self, name: str) -> bool: ...

    def pin(self, name: str) -> None: ...

    def find(self, name: str) -> LoRARequest | None: ...

    @property
    def requests(self) -> list[LoRARequest]: ...

    @property
    def running(self) -> list[str]: ...

    @property
    def waiting(self) -> list[str]: ...


class Core(Protocol):
    """A started engine. `failed` has a result once it has failed for good: why."""

    input_processor: InputProcessor
    failed: asyncio.Future[str]

    async def submit(self, given: Submission) -> None: ...

    def abort(self, request_id: str, cause: AbortCause) -> None: ...

    @property
    def lora(self) -> Adapters:
        """Raises `InvalidRequestError` where the engine serves no adapters."""
        ...

    @property
    def adapters(self) -> Adapters | None: ...

    @property
    def startup(self) -> dict[str, Any]: ...

    @property
    def replicas(self) -> Sequence[Replica]: ...

    def health(self) -> str | None: ...

    def stats(self) -> SchedulerStats: ...

    def check_integrity(self) -> None: ...

    def check_idle(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    async def close(self) -> None: ...
