"""A start or an end that is cancelled: what was begun is closed, once, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncllm import LLM
from asyncllm.engine import core_loader
from asyncllm.worker.worker import Worker
from tests.engine.test_async_engine import ENDLESS, GREEDY, SMALL, small_engine
from tests.waiting import PATIENCE_SECONDS, run, until


class Workshop:
    """Makes real workers, each when it is let; says what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.go = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Worker:
        name = f"worker {sum(event.endswith('begun') for event in self.events)}"
        self.events.append(f"{name} begun")
        assert self.go.wait(PATIENCE_SECONDS)
        worker = Worker(*args, **kwargs)
        close = worker.close

        def noted_close() -> None:
            self.events.append(f"{name} closed")
            close()

        worker.close = noted_close  # type: ignore[method-assign]
        self.events.append(f"{name} made")
        return worker


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    made = Workshop()
    monkeypatch.setattr(core_loader, "Worker", made)
    yield made
    made.go.set()


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_start_closes_what_it_was_loading(workshop: Workshop) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        engine = small_engine()
        start = asyncio.create_task(engine.start())
        await until(lambda: workshop.events)
        await cancelled(start)  # at once: the worker is not made yet
        assert workshop.events == ["worker 0 begun"]
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        workshop.go.set()
        await closing
        assert workshop.events == ["worker 0 begun", "worker 0 made", "worker 0 closed"]
        assert not set(threading.enumerate()) - threads

    run(main())


def test_the_tokenizer_waits_for_the_worker_to_have_imported(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = core_loader.load_text

    def noted(*args: Any) -> Any:
        loaded = load(*args)
        workshop.events.append("text loaded")
        return loaded

    monkeypatch.setattr(core_loader, "load_text", noted)

    async def main() -> None:
        engine = small_engine()
        start = asyncio.create_task(engine.start())
        await asyncio.sleep(0.1)  # longer than this tokenizer takes
        assert workshop.events == ["worker 0 begun"]
        workshop.go.set()
        await start
        assert "text loaded" in workshop.events
        await engine.aclose()

    run(main())


def test_a_worker_that_fails_before_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Worker:
        raise ValueError("no such backend")

    monkeypatch.setattr(core_loader, "Worker", failing)

    async def main() -> None:
        threads = set(threading.enumerate())
        with pytest.raises(ValueError, match="no such backend"):
            await small_engine().start()
        await until(lambda: not set(threading.enumerate()) - threads)

    run(main())


def test_closed_even_if_the_loop_has_ended(workshop: Workshop) -> None:
    async def main() -> None:
        start = asyncio.create_task(small_engine().start())
        await until(lambda: workshop.events)
        await cancelled(start)

    run(main())
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("asyncllm-load"))
    workshop.go.set()
    thread.join(PATIENCE_SECONDS)
    assert workshop.events == ["worker 0 begun", "worker 0 made", "worker 0 closed"]


@pytest.mark.slow
def test_an_interrupted_llm_closes_what_it_was_loading(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C in a notebook, while `LLM(...)` loads."""
    run_on_loop = asyncio.run_coroutine_threadsafe

    def interrupted(*args: Any) -> Any:
        future = run_on_loop(*args)

        def result() -> None:
            while not workshop.events:
                time.sleep(0.002)
            raise KeyboardInterrupt

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", run_on_loop)
        future.result = result  # type: ignore[method-assign, assignment]
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM("tiny", **SMALL)
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("asyncllm-load"))
    workshop.go.set()
    thread.join(PATIENCE_SECONDS)
    assert workshop.events == ["worker 0 begun", "worker 0 made", "worker 0 closed"]
    gc.collect()
    assert not caplog.records  # no task destroyed while pending


@pytest.mark.slow
def test_a_start_after_a_cancelled_one_loads_when_the_first_is_closed(workshop: Workshop) -> None:
    async def main() -> None:
        engine = small_engine()
        start = asyncio.create_task(engine.start())
        await until(lambda: workshop.events)
        await cancelled(start)
        answer = asyncio.ensure_future(engine.generate("hello", GREEDY))
        workshop.go.set()
        assert (await answer).finished
        await engine.aclose()

    run(main())
    assert workshop.events == [
        "worker 0 begun", "worker 0 made", "worker 0 closed",
        "worker 1 begun", "worker 1 made", "worker 1 closed",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_cancelled_aclose_goes_on(workshop: Workshop) -> None:
    async def main() -> None:
        workshop.go.set()
        engine = small_engine()
        await engine.start()
        running = asyncio.ensure_future(engine.generate("a", ENDLESS))
        await until(lambda: engine.stats().num_running)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        await cancelled(closing)
        await engine.aclose()
        assert workshop.events == ["worker 0 begun", "worker 0 made", "worker 0 closed"]
        await asyncio.wait([running])
        assert "closed" in str(running.exception())

    run(main())
