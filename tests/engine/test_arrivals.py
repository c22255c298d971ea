"""An abort reaches a request before the scheduler has it: the engine starts, a thread works for it.

Each test aborts while the request waits in one place, and looks that it ends there, that nothing is
left of it, and that its id is free.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from asyncllm.engine.structured.compiler import GrammarCompiler
from asyncllm.engine.text.prompt_encoder import PromptEncoder
from asyncllm.engine.text.tokenizer import LARGE_TEXT_CHARS
from tests.engine.test_async_engine import GREEDY, settle, small_engine
from tests.waiting import PATIENCE_SECONDS, run, until

LONG_TEXT = "once upon a time " * (LARGE_TEXT_CHARS // 10)


def asked(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams) -> asyncio.Task[Any]:
    async def work() -> RequestOutput:
        return await engine.generate(prompt, params, request_id="a")

    return asyncio.create_task(work())


def check_aborted(output: RequestOutput, num_answers: int = 1) -> None:
    assert output.request_id == "a" and output.finished and output.error is None
    assert [answer.finish_reason for answer in output.outputs] == ["abort"] * num_answers
    assert not any(answer.token_ids or answer.text for answer in output.outputs)


async def check_free(engine: AsyncLLMEngine) -> None:
    """Nothing is left of "a", and another may have its name."""
    await settle(engine)
    assert not len(engine._arrivals)
    again = await engine.generate("hello", GREEDY, request_id="a")
    assert again.outputs[0].finish_reason == "length"
    await settle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("num_turns", [0, 1, 5])
def test_while_the_engine_starts(num_turns: int) -> None:
    async def main() -> None:
        engine = small_engine()
        try:
            task = asked(engine, "hello", SamplingParams(n=2, max_tokens=900))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            assert engine.health() == "loading" and not task.done()
            if not num_turns:  # the task has not begun: its prompt is not known yet
                engine.abort("a")
                await asyncio.sleep(0)
            engine.abort("a")
            async with asyncio.timeout(PATIENCE_SECONDS):
                check_aborted(await task, num_answers=2)
            assert engine.health() == "loading"  # it did not wait for the end of the start
            await engine.start()
            await check_free(engine)
        finally:
            await engine.aclose()

    run(main())


def test_before_it_is_awaited() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            waiting = asyncio.ensure_future(engine.generate("hello", GREEDY, request_id="a"))
            engine.abort("a")
            check_aborted(await waiting)
            iterated = engine.generate("hello", GREEDY, request_id="a")
            engine.abort("a")
            (output,) = [output async for output in iterated]
            check_aborted(output)
            del iterated
            await check_free(engine)

    run(main())


@pytest.mark.slow
def test_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_async, begun, go = GrammarCompiler.compile_async, asyncio.Event(), asyncio.Event()

    async def slow(self: GrammarCompiler, params: StructuredOutputsParams) -> Any:
        begun.set()
        await go.wait()
        return await compile_async(self, params)

    async def main() -> None:
        async with small_engine() as engine:
            monkeypatch.setattr(GrammarCompiler, "compile_async", slow)
            wanted = StructuredOutputsParams(choice=["yes", "no"])
            task = asked(engine, "hello", SamplingParams(structured_outputs=wanted))
            await begun.wait()
            engine.abort("a", "disconnect")
            check_aborted(await task)
            assert engine.recorder.aborts == {"disconnect": 1}
            go.set()
            await check_free(engine)

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("ends_first", [False, True], ids=["encoding", "encoded in that turn"])
def test_while_a_thread_encodes_its_text(ends_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids, begun, go = PromptEncoder.token_ids, threading.Event(), threading.Event()

    def slow(self: PromptEncoder, *args: Any) -> list[int]:
        begun.set()
        assert go.wait(PATIENCE_SECONDS)
        return token_ids(self, *args)

    async def main() -> None:
        async with small_engine() as engine:
            with monkeypatch.context() as patch:
                patch.setattr(PromptEncoder, "token_ids", slow)
                task = asked(engine, LONG_TEXT, SamplingParams(truncate_prompt_tokens=9))
                await until(begun.is_set)
                if ends_first:  # the thread's result is on the loop, and the task not woken yet
                    go.set()
                    threads = engine.input_processor._threads
                    assert threads is not None
                    threads.submit(lambda: None).result(PATIENCE_SECONDS)
                    threads.shutdown(wait=True)
                    engine.input_processor._threads = None
                engine.abort("a")
                check_aborted(await task)
                go.set()
            await check_free(engine)

    run(main())


def test_a_sink_hears_of_it() -> None:
    """As the server asks: `add_request` returns, and its sink has the end."""

    async def main() -> None:
        async with small_engine() as engine:
            heard: list[RequestOutput] = []
            adding = asyncio.create_task(
                engine.add_request("a", LONG_TEXT, SamplingParams(), heard.append)
            )
            await asyncio.sleep(0)
            engine.abort("a")
            await adding
            (output,) = heard
            check_aborted(output)
            await check_free(engine)

    run(main())


@pytest.mark.slow
def test_ids_that_do_not_exist_are_not_remembered() -> None:
    async def main() -> None:
        engine = small_engine()
        engine.abort(["never", "nor this"])
        await engine.start()
        engine.abort(["never", "nor this"])
        dropped = engine.generate("hello", GREEDY, request_id="dropped")
        assert len(engine._arrivals) == 1
        del dropped
        gc.collect()
        assert not len(engine._arrivals)
        for name in ("never", "dropped"):
            output = await engine.generate("hello", GREEDY, request_id=name)
            assert output.outputs[0].finish_reason == "length"
        assert not engine.recorder.aborts
        engine.check_idle()
        await engine.aclose()

    run(main())


def test_a_refused_or_cancelled_request_is_not_remembered() -> None:
    async def main() -> None:
        async with small_engine() as engine:
            with pytest.raises(ValueError, match="vocabulary"):
                await engine.generate([10**9], GREEDY, request_id="a")
            assert not len(engine._arrivals)
            task = asked(engine, LONG_TEXT, GREEDY)
            await asyncio.sleep(0)
            assert len(engine._arrivals) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await check_free(engine)

    run(main())
