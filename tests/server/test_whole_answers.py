"""Where the body of a whole answer is made: many log-probabilities must not hold the loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.sampling_params import SamplingParams
from asyncllm.server.http.bodies import OFF_LOOP, OffLoop, render_response
from asyncllm.server.inputs.call import Call


@pytest.mark.parametrize(
    ("fields", "on_loop"),
    [({}, True), ({"logprobs": 1}, False), ({"prompt_logprobs": 1}, False)],
)
def test_log_probabilities_are_rendered_off_the_loop(fields: dict[str, int], on_loop: bool) -> None:
    def render() -> dict[str, Any]:
        return {"here": threading.current_thread() is threading.main_thread()}

    call = Call(id="a", model="m", prompts=[], params=SamplingParams(**fields))
    off_loop = OffLoop()
    http: Any = SimpleNamespace(app={OFF_LOOP: off_loop})
    response = asyncio.run(render_response(http, render, call.has_logprobs))
    asyncio.run(off_loop.close())
    assert response.text == f'{{"here":{str(on_loop).lower()}}}'
