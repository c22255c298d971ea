"""Several engines behind one face: where a request runs, and what concerns all of them.

A request is tokenised here, placed by the `Router`, and from then on one engine's: its deltas go
straight to its sink. An engine that has failed gets nothing more; its requests have ended with an
error, and the others go on. The group has failed when all have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

from asyncllm.engine.arrival import Submission
from asyncllm.engine.core import Adapters, Core, Replica
from asyncllm.engine.data_parallel.adapters import GroupAdapters
from asyncllm.engine.data_parallel.remote import RemoteCore
from asyncllm.engine.data_parallel.router import Placement, Router
from asyncllm.engine.data_parallel.supervisor import Supervisor
from asyncllm.engine.engine_core import EngineCore
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.output_state import Sink
from asyncllm.engine.stats import AbortCause, SchedulerStats
from asyncllm.engine.text.prompt import parse_prompt
from asyncllm.errors import EngineDeadError, InvalidRequestError, LoRALoadError
from asyncllm.lora import LoRARequest
from asyncllm.outputs import RequestOutput

logger = logging.getLogger("asyncllm")


class EngineGroup:
    """Implements `Core`. Made on the loop of its members, in the order of their ranks."""

    def __init__(
        self,
        members: Sequence[Core],
        input_processor: InputProcessor,
        block_size: int,
        supervisors: Sequence[Supervisor] = (),
    ) -> None:
        """supervisors: of members in processes of their own."""
        self.members, self._supervisors = members, supervisors
        self.input_processor = input_processor
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._router = Router([_capacity(member.stats(), block_size) for member in members])
        self._placed: dict[str, Placement] = {}  # by request id, from its placement to its end
        for rank, member in enumerate(members):
            member.failed.add_done_callback(partial(self._member_failed, rank))
            if isinstance(member, EngineCore | RemoteCore):
                member.changed = partial(self._member_changed, rank)

    # --- requests ----------------------------------------------------------------------------

    async def submit(self, given: Submission) -> None:
        """Place a request and queue it there. Raises as `EngineCore.submit`."""
        request_id = given.arrival.request_id
        parsed = parse_prompt(given.prompt)
        params = given.params or self.input_processor.default_params({})
        text, ids, _ = await self.input_processor.encode(parsed, params)
        if request_id in self._placed:  # on whichever engine
            raise InvalidRequestError(f"request_id {request_id!r} is in use", "request_id")
        lora = given.lora_request
        if lora is not None and not self.lora.have(lora):
            if given.adds_lora:
                await self._add_lora(lora)
            elif self.lora.find(lora.lora_name) == lora:  # an engine loads it, or cannot
                with suppress(InvalidRequestError):
                    await self._add_lora(lora)
        key = repr((given.cache_salt or parsed.cache_salt, lora and lora.lora_name)).encode()
        if len(ids) <= self.input_processor.max_model_len:  # else it is refused, as it came
            parsed = parsed._replace(text=text, token_ids=ids, messages=None)
        given = replace(given, prompt=parsed, params=params)
        while not await self._place(given, ids, key):
            pass

    async def _place(self, given: Submission, ids: list[int], key: bytes) -> bool:
        """False where the engine that was chosen has just died."""
        request_id, placement = given.arrival.request_id, self._router.place(ids, key)
        if placement is None:
            raise EngineDeadError(self.health() or "no engine takes requests")
        self._placed[request_id] = placement
        receive = self._noting(request_id, placement, given.sink)
        try:
            await self.members[placement.rank].submit(replace(given, sink=receive))
        except EngineDeadError:
            self._end(request_id, placement)
            self._router.close(placement.rank)
            return False
        except BaseException:
            self._end(request_id, placement)
            raise
        if given.arrival.is_aborted:
            self._end(request_id, placement)
        return True

    async def _add_lora(self, lora: LoRARequest) -> None:
        """On all engines, as the next request for it may go to another."""
        try:
            await self.lora.add(lora)
        except LoRALoadError as error:
            raise InvalidRequestError(str(error), "lora_request") from error

    def _noting(self, request_id: str, placement: Placement, sink: Sink) -> Sink:
        """The sink of a request, whose first and last outputs change its engine's load."""

        def receive(output: RequestOutput) -> None:
            if output.finished:
                self._end(request_id, placement)
            else:
                self._router.begun(placement)
            sink(output)

        return receive

    def _end(self, request_id: str, placement: Placement) -> None:
        if self._placed.get(request_id) is placement:
            del self._placed[request_id]
            self._router.ended(placement)

    def abort(self, request_id: str, cause: AbortCause) -> None:
        if (placement := self._placed.get(request_id)) is not None:
            self.members[placement.rank].abort(request_id, cause)

    # --- all engines -------------------------------------------------------------------------

    def _member_failed(self, rank: int, failed: asyncio.Future[str]) -> None:
        self._router.close(rank)
        self._router.forget(rank)
        logger.critical("engine %d takes no more requests: %s", rank, failed.result())
        if not self.failed.done() and all(member.failed.done() for member in self.members):
            self.failed.set_result(self._reasons())

    def _member_changed(self, rank: int, is_up: bool) -> None:
        """Its process ended, or serves again with an empty cache; or its steps stand still."""
        if is_up:
            self._router.open(rank)
        else:
            self._router.close(rank)
            self._router.forget(rank)

    def _reasons(self) -> str:
        """Say what is wrong, by rank."""
        found = ((rank, member.health()) for rank, member in enumerate(self.members))
        return "; ".join(f"engine {rank}: {why}" for rank, why in found if why is not None)

    def health(self) -> str | None:
        """None as long as one serves."""
        is_served = any(member.health() is None for member in self.members)
        return None if is_served else self._reasons()

    @property
    def lora(self) -> GroupAdapters:
        members = sorted(self.members, key=lambda member: member.health() is not None)
        return GroupAdapters([member.lora for member in members], self.health())

    @property
    def adapters(self) -> Adapters | None:
        return None if self.members[0].adapters is None else self.lora

    @property
    def startup(self) -> dict[str, Any]:
        """The first engine's, and how many there are."""
        return {**self.members[0].startup, "data_parallel_size": len(self.members)}

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(replica for member in self.members for replica in member.replicas)

    def stats(self) -> SchedulerStats:
        """The sums."""
        each = [member.stats() for member in self.members]
        names = [field.name for field in fields(SchedulerStats) if field.name != "num_groups"]
        sums = {name: sum(getattr(stats, name) for stats in each) for name in names}
        return SchedulerStats(**sums, num_groups=each[0].num_groups)

    def check_integrity(self) -> None:
        self._router.check_integrity()
        for member in self.members:
            member.check_integrity()

    def check_idle(self) -> None:
        assert not self._placed, f"requests are placed: {sorted(self._placed)}"
        for rank, member in enumerate(self.members):
            assert self._router.load(rank) == 0, f"engine {rank} has a load"
            member.check_idle()

    def reset_prefix_cache(self) -> None:
        for rank, member in enumerate(self.members):
            member.reset_prefix_cache()
            self._router.forget(rank)

    async def close(self) -> None:
        self.input_processor.close()
        for supervisor in self._supervisors:
            await supervisor.close()
        await asyncio.gather(*(member.close() for member in self.members))


def _capacity(stats: SchedulerStats, block_size: int) -> int:
    """Tokens that an engine's pages hold."""
    return stats.num_pages // stats.num_groups * block_size
