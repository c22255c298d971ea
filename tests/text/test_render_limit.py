"""A chat template that never ends is refused, on the event loop and in a thread."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop

from asyncllm.engine.text import render_limit
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import InvalidRequestError
from asyncllm.model_config import resolve_model_path

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Ends, unless it is asked not to.
TEMPLATE = (
    "{% if messages[0].content == 'never' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
)


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model_path("tiny"), TEMPLATE)


@pytest.fixture
def with_signal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(render_limit._Signal, "seconds", 0.2)
    monkeypatch.setattr(render_limit._Signal, "is_installed", False)
    render_limit.install_signal()
    yield
    signal.signal(signal.SIGALRM, before)


def test_on_the_event_loop(tokenizer: Tokenizer, with_signal: None) -> None:
    async def test() -> None:
        start = time.monotonic()
        for _ in range(3):
            with pytest.raises(InvalidRequestError, match="template takes too long"):
                tokenizer.render_chat(chat("never"))
            assert tokenizer.render_chat(chat("Hi")) == "Hi"
            await asyncio.sleep(0.01)
        assert time.monotonic() - start < 5
        await asyncio.sleep(0.1)  # no alarm comes later

    uvloop.run(test())
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


class Callback:
    """A weak reference's callback, in which exceptions are dropped, takes this long."""

    def __init__(self, seconds: float) -> None:
        class Referent:
            pass

        referent = Referent()
        self._reference = weakref.ref(referent, lambda _: self._wait(seconds))

    @staticmethod
    def _wait(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException] | None]:
    """The exceptions that were raised where nobody can catch them."""
    found: list[type[BaseException] | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: found.append(error.exc_type))
    return found


def test_a_deadline_that_a_callback_swallows_comes_again(
    with_signal: None, dropped: list[type[BaseException] | None]
) -> None:
    def render() -> None:
        Callback(0.3)
        while True:
            pass

    with pytest.raises(render_limit.RenderTimeoutError):
        render_limit.limited(render)
    assert dropped == [render_limit.RenderTimeoutError]


@pytest.mark.parametrize("ends", [False, True])
def test_in_a_thread_too(
    monkeypatch: pytest.MonkeyPatch, dropped: list[type[BaseException] | None], ends: bool
) -> None:
    monkeypatch.setattr(render_limit, "THREAD_SECONDS", 0.2)

    def render() -> None:
        Callback(0.4)
        while not ends:
            pass

    def work() -> int:
        with pytest.raises(render_limit.RenderTimeoutError):
            render_limit.limited(render)
        return sum(range(1000))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result(timeout=60) == 499_500
    assert dropped == [render_limit.RenderTimeoutError]


def test_after_one_that_was_too_slow_less_time_is_given(
    tokenizer: Tokenizer, with_signal: None
) -> None:
    with pytest.raises(InvalidRequestError):
        tokenizer.render_chat(chat("never"))
    assert render_limit._Signal.seconds == render_limit.NEXT_LOOP_SECONDS


def test_in_a_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limit, "THREAD_SECONDS", 0.2)
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_ident).result()
        for _ in range(3):
            late = pool.submit(tokenizer.render_chat, chat("never"))
            with pytest.raises(InvalidRequestError, match="template takes too long"):
                late.result(timeout=60)
            assert pool.submit(tokenizer.render_chat, chat("Hi")).result() == "Hi"
        assert pool.submit(threading.get_ident).result() == thread


def test_what_comes_too_late_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limit, "THREAD_SECONDS", 0.0)

    def work() -> int:
        for _ in range(300):
            try:
                render_limit.limited(lambda: sum(range(10)))
            except render_limit.RenderTimeoutError:
                continue
        return sum(range(1000))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result(timeout=60) == 499_500


def test_nothing_is_left_pending(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that was taken back would have CPython 3.11 spin where a profiler watches."""
    calls: list[str] = []
    for seconds in (10.0, 0.0):
        monkeypatch.setattr(render_limit, "THREAD_SECONDS", seconds)
        with ThreadPoolExecutor(1) as pool:
            for _ in range(20):
                pool.submit(tokenizer.render_chat, chat("Hi")).exception()
            pool.submit(tokenizer.render_chat, []).exception()
        calls.clear()
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        chat("Hi")
        sys.setprofile(None)
        assert "call" in calls
