"""Python's garbage collector in a process that serves: no token waits for it.

What a request leaves behind its reference counts free, all of it: a test holds every kind of
request to that. So a collection finds nothing, and walks over all live requests to find it, 10 to
25 ms at 256 streams. Hence what exists at the start is left out for good, a collection comes by
itself only for YOUNG_OBJECTS more than the last one left, and one is made where nobody is answered.
An application that embeds the engine decides for itself: only `serve` uses this.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from asyncllm.server.service import Service

YOUNG_OBJECTS = 100_000  # a stream has about 110: 900 of them more than there were
QUIET_CHECK_SECONDS = 10.0
FEW_OBJECTS = 700  # not worth a collection: Python's own first threshold


@contextmanager
def patient_collector(service: Service) -> Iterator[None]:
    """Within it. Everything that is to live as long as the process must exist before."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    quiet = asyncio.create_task(_collect_when_quiet(service))
    try:
        yield
    finally:
        quiet.cancel()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _collect_when_quiet(service: Service) -> None:
    """What a library of somebody's may have left: nobody waits meanwhile."""
    while True:
        await asyncio.sleep(QUIET_CHECK_SECONDS)
        if not service.num_live and gc.get_count()[0] > FEW_OBJECTS:
            gc.collect()
