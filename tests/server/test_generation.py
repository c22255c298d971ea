"""Every end of an answer, on a consumer and an engine of the test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.outputs import RequestOutput
from asyncllm.sampling_params import SamplingParams
from asyncllm.server.http.errors import ApiError
from asyncllm.server.inputs.call import Call
from asyncllm.server.outputs.generation import Generation


class Unfinished:
    """A `Consumer` that cannot write its last words."""

    def __init__(self) -> None:
        self.errors: list[ApiError] = []

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        pass

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        pass

    def finish(self) -> None:
        raise RuntimeError("no last words")

    def fail(self, error: ApiError) -> None:
        self.errors.append(error)


def test_who_waits_for_an_answer_that_cannot_be_finished_hears_of_it() -> None:
    consumer = Unfinished()
    engine: Any = None  # nothing is asked of it
    last = RequestOutput("cmpl-0", None, [1], None, [], finished=True)

    async def test() -> None:
        call = Call("cmpl", "tiny", [[1], [1]], SamplingParams())
        generation = Generation(engine, call, lambda: consumer)
        waiting = asyncio.create_task(generation.wait())
        for index in (0, 1):
            await asyncio.sleep(0)
            assert not waiting.done()
            generation._receive(f"cmpl-{index}", index, last)
        with pytest.raises(ApiError) as raised:
            await asyncio.wait_for(waiting, 10)
        assert raised.value.status == 500 and consumer.errors == [raised.value]

    asyncio.run(test())
