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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        with _thread_deadline():
            return render()
    if not _Signal.is_installed:
        return render()
    _Signal.is_armed = True
    signal.setitimer(signal.ITIMER_REAL, _Signal.seconds)
    try:
        return render()
    finally:
        _Signal.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _thread_deadline() -> Iterator[None]:
    thread_id, lock, is_open = threading.get_ident(), threading.Lock(), True

    def interrupt() -> None:
        with lock:
            if is_open:
                _set_exception(thread_id, ctypes.py_object(RenderTimeoutError))

    timer = threading.Timer(THREAD_SECONDS, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:  # what was raised too late for the template must not reach anything else
            is_open = False
            _set_exception(thread_id, ctypes.py_object())  # NULL: none


_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = [ctypes.c_ulong, ctypes.py_object]
