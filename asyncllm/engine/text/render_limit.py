"""A deadline for rendering chat templates, which are programs and may never end.

On the main thread, where a server's event loop runs, the signal of a timer interrupts rendering, if
`serve` has installed the handler (an engine inside an application installs none). In another thread
an exception is injected. Both take effect only between two instructions of Python code: a long call
into C, such as a huge multiplication of a string, is not interrupted.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

LOOP_SECONDS = 1.0  # for chats below 8 KiB, which take under a millisecond
NEXT_LOOP_SECONDS = 0.05  # after one was too slow, as each blocks all streams
THREAD_SECONDS = 10.0  # for the largest chats, which take about 2 s


class RenderTimeoutError(BaseException):
    """It is no `Exception`, so that neither jinja2 nor transformers catches it."""


class _Signal:
    """The main thread's deadline. The handler raises only while `is_armed`."""

    is_installed = False
    is_armed = False
    seconds = LOOP_SECONDS


def install_signal() -> None:
    """Install the handler; must be called on the main thread."""
    signal.signal(signal.SIGALRM, _on_alarm)
    _Signal.is_installed = True


def _on_alarm(number: int, frame: FrameType | None) -> None:
    if _Signal.is_armed:
        _Signal.is_armed = False
        _Signal.seconds = min(_Signal.seconds, NEXT_LOOP_SECONDS)
        raise RenderTimeoutError


def limited(render: Callable[[], T]) -> T:
    """Raises `RenderTimeoutError`."""
    if threading.current_thread() is not threading.main_thread():
        return _limited_in_thread(render)
    if not _Signal.is_installed:
        return render()
    _Signal.is_armed = True
    signal.setitimer(signal.ITIMER_REAL, _Signal.seconds)
    try:
        return render()
    finally:
        _Signal.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


class _ThreadDeadline:
    """Raises `RenderTimeoutError` once in the thread that created it, unless it is closed
    before."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._lock = threading.Lock()
        self._is_open = True
        self._has_fired = False
        self._timer = threading.Timer(THREAD_SECONDS, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def _fire(self) -> None:
        with self._lock:
            if self._is_open:
                self._has_fired = True
                _set_exception(self._thread_id, RenderTimeoutError)

    def close(self) -> None:
        """Nothing is raised after this call; an exception that is pending is raised by it.

        A pending exception must not be cancelled instead: CPython 3.11 would then check for it
        forever, and spin in a function that is being profiled.
        """
        self._timer.cancel()
        with self._lock:
            self._is_open = False
        while self._has_fired:
            time.sleep(0)


def _limited_in_thread(render: Callable[[], T]) -> T:
    deadline = _ThreadDeadline()
    try:
        result = render()
    except RenderTimeoutError:  # it fires only once
        raise
    except BaseException:
        deadline.close()
        raise
    deadline.close()
    return result


_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = [ctypes.c_ulong, ctypes.py_object]
