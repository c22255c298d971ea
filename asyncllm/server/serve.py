"""The server's life: bind, listen, load, serve, drain. Until the model is loaded all is 503.

SIGINT or SIGTERM refuses new requests (503, at /health too) and lets running ones finish within
`shutdown_timeout`; those that do not are ended with an error event. A second signal leaves at once.
While the model loads Python's own handling applies. The garbage collector is held back meanwhile:
`patient_collector`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.text.render_limit import install_signal
from asyncllm.errors import EngineDeadError
from asyncllm.server.app import build_app
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.listener import Listener
from asyncllm.server.lora import load_modules
from asyncllm.server.observability.logs import RequestLog, StatsLog
from asyncllm.server.service import SERVICE, Service

logger = logging.getLogger("asyncllm")

CLOSE_TIMEOUT_SECONDS = 2.0  # for handlers to write their last bytes
EXIT_CODE_SECOND_SIGNAL = 1


async def serve(
    engine: AsyncLLMEngine, args: ServerArgs, listener: Listener, started: float
) -> None:
    """Serve until a signal. `started`: `time.perf_counter()` when the command began.

    Raises `OSError`, `ValueError`, `ModelLoadError` for what fails at start, and `EngineDeadError`
    where the device was lost later: a supervisor then starts another process.
    """
    imported = time.perf_counter() - started
    install_signal()
    app = build_app(engine, args)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that is gone ends its handler, which aborts
        access_log=None,
        shutdown_timeout=CLOSE_TIMEOUT_SECONDS,
    )
    await runner.setup()
    try:
        await listener.start(runner)  # from here on /health reports that the model loads
        await engine.start()
        await load_modules(engine, args)
        stop = _stop_on_signals()
        with logs(engine, args), patient_collector(app[SERVICE]):
            _announce(engine, listener, started, imported)
            await _stop_or_failure(stop, engine)
            await drain(app[SERVICE], args.shutdown_timeout)
    finally:
        listener.close()  # before the app behind it is gone
        await runner.cleanup()
        if engine.health() != "loading":  # an interrupted load is not waited for
            await engine.aclose()


async def _stop_or_failure(stop: asyncio.Event, engine: AsyncLLMEngine) -> None:
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(engine.wait_failed())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    failing.cancel()
    if not stop.is_set():
        raise EngineDeadError(failing.result())


async def drain(service: Service, patience_seconds: float) -> None:
    """Refuse new requests, wait for running ones, then end what is left with an error."""
    service.draining = True
    logger.info(
        "shutting down: %d in progress, which have %g s; Ctrl-C or SIGTERM again ends now",
        service.num_live,
        patience_seconds,
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_seconds):
            await service.idle()
    service.fail_live(ApiError(503, "the server is shutting down"))


@contextmanager
def logs(engine: AsyncLLMEngine, args: ServerArgs) -> Iterator[None]:
    """Log what the flags ask for, statistics until the block ends."""
    if args.enable_log_requests:
        engine.stat_loggers.append(RequestLog())
    if args.disable_log_stats:
        yield
        return
    log = StatsLog(engine.stats)
    engine.stat_loggers.append(log)
    task = asyncio.create_task(log.run())
    try:
        yield
    finally:
        task.cancel()


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            sys.stderr.flush()
            os._exit(EXIT_CODE_SECOND_SIGNAL)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop


def _announce(engine: AsyncLLMEngine, listener: Listener, started: float, imported: float) -> None:
    """`imported`: seconds from `started` until the engine could start."""
    startup = engine.startup
    total = time.perf_counter() - started
    startup["seconds"] = {
        "imports": round(imported, 3),
        **startup["seconds"],
        "command_to_ready": round(total, 3),
    }
    for name, value in startup.items():
        if value is None:  # a chunk without a bound, as on a CPU
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{part} {number}" for part, number in value.items())
        print(f"{name.replace('_', ' '):24}{value}")
    print(f"listening on {listener.url}", flush=True)


YOUNG_OBJECTS = 100_000  # a stream has about 110: 900 of them more than there were
QUIET_CHECK_SECONDS = 10.0
FEW_OBJECTS = 700  # not worth a collection: Python's own first threshold


@contextmanager
def patient_collector(service: Service) -> Iterator[None]:
    """Keep Python's garbage collector from tokens. Enter it once all long-lived objects exist.

    Requests leave nothing that reference counts do not free: a test holds every kind of request to
    that. So a collection finds nothing, and walks over all live requests to find it, 10 to 25 ms at
    256 streams. Hence objects of the start are left out for good, a collection comes by itself only
    for YOUNG_OBJECTS more than the last one left, and one is made while no request runs. An
    application that embeds the engine decides for itself.
    """
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
    """Collect what libraries may have left, while no request waits."""
    while True:
        await asyncio.sleep(QUIET_CHECK_SECONDS)
        if not service.num_live and gc.get_count()[0] > FEW_OBJECTS:
            gc.collect()
