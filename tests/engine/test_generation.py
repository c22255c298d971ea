"""Awaiting costs no turn per token, and a generation that nobody holds is aborted."""

from __future__ import annotations

import asyncio
import collections
import threading
from typing import Any

from asyncllm.engine.generation import Generation
from asyncllm.engine.output_state import Sink
from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.sampling_params import RequestOutputKind
from tests.waiting import PATIENCE_SECONDS

NUM_TOKENS = 200


def delta(token_id: int) -> RequestOutput:
    completion = CompletionOutput(0, "a", [token_id])
    finished = token_id == NUM_TOKENS - 1
    if finished:
        completion.finish_reason = "length"
    return RequestOutput("r", None, [1], None, [completion], finished)


def test_no_turn_per_token_for_who_awaits_the_end() -> None:
    made: collections.Counter[str] = collections.Counter()

    async def test() -> None:
        sinks: list[Sink] = []

        async def submit(sink: Sink) -> None:
            sinks.append(sink)

        generation = Generation(submit, lambda: None, RequestOutputKind.CUMULATIVE)
        answer = asyncio.create_task(generation._final())
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        create_future: Any = loop.create_future

        def counted() -> Any:
            made["future"] += 1
            return create_future()

        loop.create_future = counted  # type: ignore[method-assign]
        for token_id in range(NUM_TOKENS):
            sinks[0](delta(token_id))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        output = await answer
        assert output.outputs[0].text == "a" * NUM_TOKENS
        assert output.outputs[0].token_ids == list(range(NUM_TOKENS))

    asyncio.run(test())
    assert made["future"] <= 2


def test_collected_in_another_thread_it_aborts_on_the_loops() -> None:
    async def test() -> threading.Thread:
        loop, aborted = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        async def submit(sink: Sink) -> None:
            sink(delta(0))

        def abort() -> None:
            aborter = threading.current_thread()
            loop.call_soon_threadsafe(aborted.set_result, aborter)

        held = [Generation(submit, abort, RequestOutputKind.DELTA)]
        await anext(held[0])
        await asyncio.to_thread(held.clear)
        return await asyncio.wait_for(aborted, PATIENCE_SECONDS)

    assert asyncio.run(test()) is threading.current_thread()
