"""How several engines start: each by a loader of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from asyncllm.config import EngineConfig
from asyncllm.engine.core import Core
from asyncllm.engine.core_loader import CoreLoader
from asyncllm.engine.data_parallel.group import EngineGroup
from asyncllm.engine.recorder import Recorder
from asyncllm.engine.stats import StatLogger


class GroupLoader:
    """As `CoreLoader`, of `data_parallel_size` engines. `recorder`: the first engine's."""

    def __init__(
        self, config: EngineConfig, recorder: Recorder, stat_loggers: list[StatLogger]
    ) -> None:
        self._config = config
        recorders = [recorder, *(Recorder() for _ in range(config.data_parallel_size - 1))]
        self._loaders = [
            CoreLoader(replace(config, data_parallel_rank=rank), each, stat_loggers)
            for rank, each in enumerate(recorders)
        ]

    async def load(self, *, progress: bool) -> EngineGroup:
        """One after the other: each sizes its memory by what the others have left."""
        members: list[Core] = []
        try:
            for loader in self._loaders:
                members += [await loader.load(progress=progress)]
        except BaseException:
            await _close(members)
            raise
        return EngineGroup(members, self._config.block_size)

    async def join(self) -> None:
        for loader in self._loaders:
            await loader.join()


async def _close(members: Sequence[Core]) -> None:
    await asyncio.gather(*(member.close() for member in members))
