"""The interface of a started engine, as `AsyncLLMEngine` uses it.

`EngineCore` runs in this process, `RemoteCore` stands for an engine in another process, and
`EngineGroup` for several of either. All methods must be called on the event loop.
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
    """Limits restarts after a loss to MAX_RESTARTS in RESTART_WINDOW_SECONDS."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque()

    def may_start(self) -> bool:
        """Count a restart. Whether it is within the limit."""
        now = time.monotonic()
        while self._starts and self._starts[0] < now - RESTART_WINDOW_SECONDS:
            self._starts.popleft()
        self._starts.append(now)
        return len(self._starts) <= MAX_RESTARTS


class Replica(Protocol):
    """One engine, as metrics and snapshots read it."""

    recorder: Recorder

    def stats(self) -> SchedulerStats: ...

    def picture(self, pages_per_cell: int) -> str: ...

    def observe(self) -> None: ...

    @property
    def work(self) -> WorkCounts: ...

    def health(self) -> str | None: ...

    def ranks(self) -> Sequence[RankStats]:
        """Stats of all ranks, rank 0 first."""
        ...


class Adapters(Protocol):
    """LoRA adapters by name. See `AdapterManager`."""

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
    """A started engine. `failed` resolves, with the reason, when it has failed for good."""

    input_processor: InputProcessor
    failed: asyncio.Future[str]

    async def submit(self, given: Submission) -> None: ...

    def abort(self, request_id: str, cause: AbortCause) -> None: ...

    @property
    def lora(self) -> Adapters:
        """Raises `InvalidRequestError` if the engine serves no adapters."""
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
