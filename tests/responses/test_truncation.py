"""The oldest turns of a conversation that is too long are left out, and no more than must be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_engine import MAX_MODEL_LEN
from tests.server.http_harness import run, serving

PATH = "/v1/responses"
TURN_CHARS = 500


def turns(number: int) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": f"{role[0]}{index:03}".ljust(TURN_CHARS // 2, ".")}
        for index in range(number)
        for role in ("user", "assistant")
    ] + [{"role": "user", "content": "last"}]


@pytest.mark.parametrize("number", [0, 1, 3, 7, 8, 20, 100])
def test_only_what_must_be_is_left_out(number: int) -> None:
    async def test() -> None:
        async with serving() as server:
            body = {
                "input": turns(number),
                "instructions": "Stay.",
                "truncation": "auto",
                "max_output_tokens": 10,
            }
            status, answer = await server.post(PATH, body)
            assert status == 200, answer
            assert answer["truncation"] == "auto"
            prompt = server.engine.seen[0].prompt
            assert prompt.startswith("<system>Stay.<user>") and "last" in prompt
            kept = [index for index in range(number) if f"u{index:03}" in prompt]
            assert kept == list(range(number - len(kept), number))
            length = len(server.engine.seen[0].token_ids)
            assert length + 10 <= MAX_MODEL_LEN
            if len(kept) < number:
                assert length + 10 + 1.5 * TURN_CHARS > MAX_MODEL_LEN

    run(test())


@pytest.mark.parametrize("truncation", ["auto", "disabled", None])
def test_what_cannot_fit_is_refused(truncation: str | None) -> None:
    async def test() -> None:
        async with serving() as server:
            long = [{"role": "user", "content": "x" * 2 * MAX_MODEL_LEN}]
            items = turns(3) + long if truncation == "auto" else turns(20)
            body = {"input": items, "truncation": truncation}
            status, answer = await server.post(PATH, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert answer["error"]["param"] == "input"

    run(test())
