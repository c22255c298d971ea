"""The watchdog: while requests are live, steps must finish.

Its thread checks once a second, as the event loop itself may be what stalls. If no step finishes
for `patience_seconds` although requests are live, `stalled` is set, /health fails, and the state of
the process is written to a file, once per stall: stacks of all threads and tasks, and the state of
queue and pages, without prompts or text. The next finished step ends the stall.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("asyncllm")

INTERVAL_SECONDS = 1.0


class Watchdog:
    """Must be created on the loop that it watches. `describe` is called from another thread."""

    def __init__(
        self, patience_seconds: float, num_live: Callable[[], int], describe: Callable[[], str]
    ) -> None:
        self.stalled: str | None = None
        self._patience = patience_seconds
        self._num_live = num_live
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._has_stepped = False  # since the last check
        self._progress_time = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="asyncllm-watchdog", daemon=True)
        self._thread.start()

    def step_done(self) -> None:
        self._has_stepped = True

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def check(self, now: float) -> None:
        """Check once. now: monotonic seconds."""
        if self._has_stepped or not self._num_live():
            self._has_stepped = False
            self._progress_time = now
            if self.stalled is not None:
                logger.warning("steps finish again")
                self.stalled = None
        elif self.stalled is None and now - self._progress_time >= self._patience:
            self.stalled = (
                f"no step has finished for {self._patience:g} s with {self._num_live()} requests "
                "in progress"
            )
            logger.critical("%s", self.stalled)
            try:
                logger.critical("its state is dumped to %s", self._dump())
            except Exception as error:  # the stall is known without it, and its end must be seen
                logger.error("its state cannot be dumped: %s", error)

    def _watch(self) -> None:
        while not self._closed.wait(INTERVAL_SECONDS):
            self.check(time.monotonic())

    def _dump(self) -> Path:
        handle, name = tempfile.mkstemp(prefix=f"asyncllm-stall-{os.getpid()}-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{self.stalled}\n\n{self._describe()}\n\nthreads:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\ntasks:\n")
            for task in asyncio.all_tasks(self._loop):
                task.print_stack(file=file)
        return Path(name)
