"""Requests on their way to the scheduler, by id, so that `abort` ends them wherever they wait.

A request arrives while its engine starts, a thread encodes its text or its grammar is compiled:
nothing else knows it then. What is never awaited is forgotten with the last reference to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class RequestAbortedError(Exception):
    """The request was aborted before it was queued. It never leaves the engine."""


class Arrival:
    """One id on its way, whoever shares it: of two with one id the second to be queued is refused.

    `asyncio.timeout` without a deadline is asyncio's own cancel scope; an abort sets the deadline.
    """

    __slots__ = ("__weakref__", "_arrivals", "_request_id", "_scopes", "is_aborted")

    def __init__(self, request_id: str, arrivals: Arrivals) -> None:
        """`arrivals` has it, and has it no more when it is queued, refused or aborted."""
        self.is_aborted = False
        self._request_id = request_id
        self._arrivals = arrivals
        self._scopes: list[asyncio.Timeout] = []

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which queues the request at its end.

        Raises `RequestAbortedError` as soon as the request is aborted.
        """
        if self.is_aborted:
            work.close()
            raise RequestAbortedError
        scope = asyncio.timeout(None)
        self._scopes.append(scope)
        try:
            async with scope:
                return await work
        except TimeoutError:
            if scope.expired():
                raise RequestAbortedError from None
            raise
        finally:
            self._scopes.remove(scope)
            if not (self._scopes or self.is_aborted):
                self._arrivals.pop(self._request_id, None)

    def abort(self) -> None:
        """What it runs must look at `is_aborted` at its end, which may come in this very turn."""
        self.is_aborted = True
        for scope in self._scopes:
            scope.reschedule(0.0)


Arrivals = WeakValueDictionary[str, Arrival]  # of one engine
