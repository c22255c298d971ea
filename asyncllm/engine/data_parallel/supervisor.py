"""Starts engines in their own processes, watches them, and restarts them.

Engines that share experts are started and restarted together, as none can run a step without the
others. If an engine ends, or is silent for SILENCE_SECONDS, the requests of all of them end with an
error and all are restarted. After too many restarts (`Restarts`) they have failed for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from asyncllm.engine.core import Restarts
from asyncllm.engine.data_parallel.links import EngineLink, link_engines
from asyncllm.engine.data_parallel.remote import RemoteCore

logger = logging.getLogger("asyncllm")

SILENCE_SECONDS = 8.0  # engines send a beat each second
SUSPECT_SECONDS = 3.0  # the same, once another engine was lost
CHECK_SECONDS = 0.5
PEERS_SECONDS = 0.2  # after one engine was lost, until it is clear which of them were the first


class Supervisor:
    def __init__(self, members: Sequence[RemoteCore]) -> None:
        """members: one engine, or all engines that share experts."""
        self._members = members
        self._restarts = Restarts()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `ValueError` or `ModelLoadError` for what cannot run, and leaves no process."""
        await self._start()
        names = ", ".join(str(member.rank) for member in self._members)
        self._task = asyncio.create_task(self._watch(), name=f"asyncllm engine {names}")

    async def close(self) -> None:
        """Stop watching and restarting."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _start(self) -> None:
        links: Sequence[EngineLink | None] = [None]
        if len(self._members) > 1:
            links = link_engines(len(self._members))
        try:
            async with asyncio.TaskGroup() as group:
                for member, link in zip(self._members, links, strict=True):
                    group.create_task(member.start(link))
            for member in self._members:
                member.serve()
        except ExceptionGroup as errors:  # the first failure cancelled the other starts
            raise errors.exceptions[0] from None
        finally:
            for link in links:
                if link is not None:
                    link.close()

    async def _watch(self) -> None:
        """Run until the engines have failed for good."""
        while True:
            reasons = await self._until_lost()
            for member in self._members:
                member.lose(reasons[member.rank])
            if not await self._start_again(reasons):
                break
            for member in self._members:
                logger.warning("engine %d serves again", member.rank)
        for member in self._members:
            member.fail(reasons[member.rank])

    async def _start_again(self, reasons: dict[int, str]) -> bool:
        """Whether a start succeeds. reasons: by rank, to which those of failed starts are added."""
        while self._restarts.may_start():
            for rank, reason in reasons.items():
                logger.error("engine %d: %s; it is started again", rank, reason)
            try:
                await self._start()
            except Exception as error:
                logger.exception("engines have not started")
                for rank in reasons:
                    reasons[rank] += f"; and then: {error}"
            else:
                return True
        return False

    async def _until_lost(self) -> dict[int, str]:
        """Wait until one of them is lost, and kill all. The reasons by rank."""
        while not self._silent_or_lost(SILENCE_SECONDS):
            lost = [member.process.lost for member in self._members]
            await asyncio.wait(lost, timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if len(self._members) > 1:
            await asyncio.sleep(PEERS_SECONDS)
        first = self._silent_or_lost(SUSPECT_SECONDS)
        ends = await asyncio.gather(*(member.process.kill() for member in self._members))
        others = f"it shares experts with engine {', '.join(map(str, first))}, which is lost"
        return {
            member.rank: f"{first[member.rank]} ({end})" if member.rank in first else others
            for member, end in zip(self._members, ends, strict=True)
        }

    def _silent_or_lost(self, silence_seconds: float) -> dict[int, str]:
        found = {}
        for member in self._members:
            process, silence = member.process, time.monotonic() - member.process.last_heard
            if process.lost.done():
                found[member.rank] = process.lost.result()
            elif silence >= silence_seconds:
                found[member.rank] = f"silent for {silence:.0f} s"
        return found
