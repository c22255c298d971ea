"""A deadline for rendering chat templates, which are programs and may never end.

On the main thread, where a server's event loop runs, the signal of a timer interrupts rendering, if
`serve` has installed the handler (an engine inside an application installs none). In another thread
an exception is injected. Both take effect only between two instructions of Python code: a long call
into C, such as a huge multiplication of a string, is not interrupted. Both come again, because an
exception that is raised inside a weak reference's callback or a finaliser is dropped.
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
AGAIN_SECONDS = 0.05  # between an exception and the next one


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
    """Raises `RenderTimeoutError` in what `limited` renders, but not in `limited` itself, which
    must get to the end of its `finally`."""
    if _Signal.is_armed and frame is not None and frame.f_code is not limited.__code__:
        _Signal.seconds = min(_Signal.seconds, NEXT_LOOP_SECONDS)
        raise RenderTimeoutError


def limited(render: Callable[[], T]) -> T:
    """Raises `RenderTimeoutError`."""
    if threading.current_thread() is not threading.main_thread():
        return _limited_in_thread(render)
    if not _Signal.is_installed:
        return render()
    _Signal.is_armed = True
    signal.setitimer(signal.ITIMER_REAL, _Signal.seconds, AGAIN_SECONDS)
    try:
        return render()
    finally:
        _Signal.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


class _ThreadDeadline:
    """Raises `RenderTimeoutError` in the thread that creates it, twice, unless it is closed."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._has_fired = False

    def start(self) -> None:
        threading.Thread(target=self._fire, daemon=True).start()

    def _fire(self) -> None:
        for seconds in (THREAD_SECONDS, AGAIN_SECONDS):
            self._closed.wait(seconds)
            with self._lock:
                if self._closed.is_set():
                    return
                self._has_fired = True
                _set_exception(self._thread_id, RenderTimeoutError)

    def close(self) -> None:
        """Nothing is raised after this call. If an exception may be pending, it raises one.

        A pending exception must not be cancelled instead: CPython 3.11 would then check for it
        forever, and spin in a function that is being profiled.
        """
        with self._lock:
            self._closed.set()
        while self._has_fired:
            _set_exception(self._thread_id, RenderTimeoutError)
            time.sleep(0)


def _limited_in_thread(render: Callable[[], T]) -> T:
    deadline = _ThreadDeadline()
    try:
        try:
            deadline.start()
            return render()
        finally:
            deadline.close()
    except RenderTimeoutError:
        # One that came before the first call had closed it. There are two at most, so that what is
        # raised by this call is the last.
        deadline.close()
        raise


_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = [ctypes.c_ulong, ctypes.py_object]
