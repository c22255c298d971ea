"""The processes that send: each takes a share, reports ready, starts at a common time, digests.

Python has one core per process, so a client that must take more chunks than one core can stamp is
several. The parent only waits and shows counters; it never touches the load. Each process watches
how late its own loop wakes: a late client measures itself, not the server.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from loadtesting.client import Client, Counter, Sent, open_session
from loadtesting.record import Conversation, LoadTestError, Record, RefusedError, now
from loadtesting.settings import Settings

try:
    import uvloop
except ImportError:  # a lower ceiling, the same figures below it
    uvloop = None

LAG_TICK_S = 0.002
START_DELAY_S = 0.05  # between the word to start and the start: all processes have heard it
LOOK_S = 0.25

# Processes are forked from one that has imported all this and has no threads.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["aiohttp", "numpy", "orjson", "uvloop", "loadtesting.worker"])

loop_factory = uvloop.new_event_loop if uvloop else None


@dataclass(frozen=True)
class Share:
    """The requests that one process sends."""

    settings: Settings
    api_key: str | None
    warmups: Sequence[Conversation]
    conversations: Sequence[Conversation]
    due_s: Sequence[float] | None  # after the start; None: closed loop
    width: int | None  # conversations at once


class Outcome(NamedTuple):
    records: list[Record]
    end_s: float
    cpu_s: float
    lag_p99_s: float
    lag_max_s: float


class Load(NamedTuple):
    """The records of all processes, and from when to when they ran."""

    records: list[Record]
    start_s: float
    end_s: float
    cpu_s: float
    lag_p99_s: float  # of the latest process
    lag_max_s: float


def deal(
    settings: Settings,
    api_key: str | None,
    warmups: Sequence[Conversation],
    conversations: Sequence[Conversation],
    due_s: Sequence[float] | None,
) -> list[Share]:
    """Deals conversations to the processes round-robin; splits the concurrency evenly."""
    num = min(settings.processes, len(conversations), settings.max_concurrency or 2**31)
    widths: list[int | None] = [None] * num
    if (width := settings.max_concurrency) is not None:
        widths = [width // num + (rank < width % num) for rank in range(num)]
    return [
        Share(
            settings,
            api_key,
            warmups[rank::num],
            conversations[rank::num],
            None if due_s is None else due_s[rank::num],
            widths[rank],
        )
        for rank in range(num)
    ]


# ---- In the parent -------------------------------------------------------------------------------


def run_shares(shares: Sequence[Share], watch: Callable[[Sequence[Sequence[int]]], None]) -> Load:
    """Warm up, start together, wait; `watch` is called a few times a second with the counters."""
    counters = [CONTEXT.RawArray("q", len(Counter)) for _ in shares]
    pipes: list[Connection] = []
    processes = []
    try:
        for share, row in zip(shares, counters, strict=True):
            pipe, far_end = CONTEXT.Pipe()
            process = CONTEXT.Process(target=work, args=(share, far_end, row), daemon=True)
            process.start()
            far_end.close()
            pipes.append(pipe)
            processes.append(process)
        for pipe in pipes:
            receive(pipe)
        start_s = now() + START_DELAY_S
        for pipe in pipes:
            pipe.send(start_s)
        waiting: list[Any] = list(pipes)
        while waiting:
            ready = connection.wait(waiting, LOOK_S)
            waiting = [pipe for pipe in waiting if pipe not in ready]
            watch(counters)
        outcomes: list[Outcome] = [receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return Load(
        records=sorted((r for o in outcomes for r in o.records), key=lambda r: r.number),
        start_s=start_s,
        end_s=max(outcome.end_s for outcome in outcomes),
        cpu_s=sum(outcome.cpu_s for outcome in outcomes),
        lag_p99_s=max(outcome.lag_p99_s for outcome in outcomes),
        lag_max_s=max(outcome.lag_max_s for outcome in outcomes),
    )


def receive(pipe: Connection) -> Any:
    try:
        answer = pipe.recv()
    except EOFError:
        raise LoadTestError("a process that sends has died") from None
    if isinstance(answer, LoadTestError):
        raise answer
    return answer


# ---- In the process that sends -------------------------------------------------------------------


def work(share: Share, pipe: Connection, counters: MutableSequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            pipe.send(runner.run(carry_out(share, pipe, counters)))
        except LoadTestError as error:
            pipe.send(error)


async def carry_out(share: Share, pipe: Connection, counters: MutableSequence[int]) -> Outcome:
    settings = share.settings
    async with (
        open_session(settings, share.api_key) as session,
        open_session(settings, share.api_key, slow=True) as slow_session,
    ):
        await warm_up(Client(settings, session, slow_session), share.warmups)
        client = Client(settings, session, slow_session, settings.check_outputs)
        gc.collect()
        gc.freeze()  # else a full collection walks everything above in the middle of the run
        pipe.send(None)
        start_s = pipe.recv()  # blocks: nothing else runs here yet
        lags_s = [0.0]
        await asyncio.sleep(max(0.0, start_s - now()))
        watchers = [asyncio.create_task(w) for w in (watch_lag(lags_s), publish(client, counters))]
        cpu_s = time.process_time()
        sent = await send_share(client, share, start_s)
        end_s, cpu_s = now(), time.process_time() - cpu_s
        for watcher in watchers:
            watcher.cancel()
        counters[:] = client.counts()
    records = [client.digest(capture, request) for request, capture in sent]
    return Outcome(records, end_s, cpu_s, float(np.percentile(lags_s, 99)), max(lags_s))


async def send_share(client: Client, share: Share, start_s: float) -> list[Sent]:
    if share.due_s is None:
        assert share.width is not None
        return await client.closed_loop(share.conversations, share.width)
    due_s = [start_s + after_s for after_s in share.due_s]
    return await client.open_loop(share.conversations, due_s, share.width)


async def warm_up(client: Client, conversations: Sequence[Conversation]) -> None:
    """Opens connections and wakes the server, with prompts and prefixes the run does not use."""
    if not conversations:
        return
    width = client.settings.max_concurrency or len(conversations)
    for request, capture in await client.closed_loop(conversations, width):
        if failure := client.digest(capture, request).failure:
            if not failure.kind.startswith("http_4"):
                raise LoadTestError(f"warm-up failed: {': '.join(failure)}")
            hint = "" if client.settings.sends_text else " (no ids taken? --text)"
            raise RefusedError(f"the server refuses this workload{hint}: {': '.join(failure)}")


async def publish(client: Client, counters: MutableSequence[int]) -> None:
    """A few times a second; counting in shared memory itself would cost a microsecond a read."""
    while True:
        await asyncio.sleep(LOOK_S)
        counters[:] = client.counts()


async def watch_lag(lags_s: list[float]) -> None:
    """How late this loop wakes, on a fixed grid: a stall counts for each tick it swallowed."""
    due_s = now() + LAG_TICK_S
    while True:
        await asyncio.sleep(max(0.0, due_s - now()))
        woken_s = now()
        while due_s <= woken_s:
            lags_s.append(woken_s - due_s)
            due_s += LAG_TICK_S
