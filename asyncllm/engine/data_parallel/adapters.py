"""LoRA adapters of several engines: each has every adapter, under the same name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncllm.engine.core import Adapters
from asyncllm.errors import EngineDeadError
from asyncllm.lora import LoRARequest


class GroupAdapters:
    """Implements `Adapters` over those of the engines, one at least."""

    def __init__(self, members: Sequence[Adapters], down: str | None) -> None:
        """members: those of engines that serve come first. down: why none does."""
        self._members, self._down = members, down

    async def add(self, request: LoRARequest, *, reload: bool = False) -> None:
        """To all, or to none: where one refuses a new name, it is removed from those that took it.
        What is wrong with the files, the first of them says before the others change. An engine
        that is down loads it when it is up again. Raises `EngineDeadError` where all are."""
        if self._down is not None:
            raise EngineDeadError(self._down)
        known = self.find(request.lora_name)
        first, *others = self._members
        await first.add(request, reload=reload)
        work = (member.add(request, reload=reload) for member in others)
        results = await asyncio.gather(*work, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if not errors:
            return
        if known is None:
            self.remove(request.lora_name)
        raise errors[0]

    def remove(self, name: str) -> bool:
        return sum(member.remove(name) for member in self._members) > 0  # from all of them

    def pin(self, name: str) -> None:
        for member in self._members:
            member.pin(name)

    def find(self, name: str) -> LoRARequest | None:
        return self._members[0].find(name)

    def have(self, request: LoRARequest) -> bool:
        """Whether all have loaded it. While they do, `find` tells of it already."""
        return all(member.find(request.lora_name) == request for member in self._members)

    @property
    def requests(self) -> list[LoRARequest]:
        return self._members[0].requests

    @property
    def running(self) -> list[str]:
        return list(dict.fromkeys(name for member in self._members for name in member.running))

    @property
    def waiting(self) -> list[str]:
        return list(dict.fromkeys(name for member in self._members for name in member.waiting))
