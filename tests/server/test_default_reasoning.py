"""Where a model thinks only when told to, a forced answer begins at once; told to, it may think."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm import AsyncLLMEngine
from tests.server.http_harness import CHAT, run, serving

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]  # no weather: the call is forced
ENGINE: dict[str, Any] = {"num_gpu_blocks_override": 120, "max_num_seqs": 4, "swap_space": 0.01}


@pytest.mark.slow
def test_a_forced_call_is_not_preceded_by_reasoning_that_nobody_asked_for() -> None:
    async def test() -> None:
        body = {
            "messages": QUESTION,
            "tools": [TOOL],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 60,
        }
        thinking = {"chat_template_kwargs": {"enable_thinking": True}}
        async with serving(AsyncLLMEngine("tiny", **ENGINE)) as server:
            assert not server.service.reasons_by_default
            status, answer = await server.post(CHAT, body)
            _, thoughtful = await server.post(CHAT, body | thinking)
        assert status == 200
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert not choice["message"]["reasoning"]
        assert thoughtful["choices"][0]["message"]["reasoning"]

    run(test())
