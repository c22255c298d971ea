"""How tests wait: for a condition, never for a time to pass.

The bounds are for a machine that is slow, or busy with something else: they are far above what
anything takes, and what they end fails with the place it waited at. Both come before
`faulthandler_timeout` in pyproject.toml, which ends a process that nothing else ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

PATIENCE_SECONDS = 90  # for one thing to happen
TEST_SECONDS = 240  # for all that a test does on its loop

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], on: Callable[..., T] = asyncio.run) -> T:
    """Returns the coroutine's result, from a loop of its own."""

    async def bounded() -> T:
        async with asyncio.timeout(TEST_SECONDS):
            return await work

    return on(bounded())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 (any condition will do)
            await asyncio.sleep(0.002)
