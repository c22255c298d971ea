"""A chat template is a program of the model's folder, and may never end: rendering has a deadline.

On the main thread, where a server's event loop runs, a timer's signal interrupts it, once `serve`
has installed the handler (an engine inside an application installs none). In another thread an
exception is raised from outside. Both reach Python code only, between two of its instructions: one
long call into C, such as a huge multiplication of a text, goes on to its end.
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

LOOP_SECONDS = 1.0  # chats below 8 KiB, which take under a millisecond
NEXT_LOOP_SECONDS = 0.05  # once one was too slow: each holds every stream
THREAD_SECONDS = 10.0  # the largest chats take about 2 s


class RenderTimeoutError(BaseException):
    """No `Exception`: neither jinja2 nor transformers may catch it."""


class _Signal:
    """The main thread's deadline. The handler raises only while `is_armed`."""

    is_installed = False
    is_armed = False
    seconds = LOOP_SECONDS


def install_signal() -> None:
    """Call it on the main thread."""
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
    """Raises `RenderTimeoutError` in the thread that made it, once, unless it is closed before."""

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
        """Afterwards nothing is raised any more. Raises what has been on its way.

        It must not be taken back instead: CPython 3.11 would then look for it for ever, and spin in
        a function that a profiler watches.
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
    except RenderTimeoutError:  # it has fired, and does so once
        raise
    except BaseException:
        deadline.close()
        raise
    deadline.close()
    return result


_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = [ctypes.c_ulong, ctypes.py_object]
