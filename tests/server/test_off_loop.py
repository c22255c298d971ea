"""The cost of large requests and answers is not the event loop's: by threads and counts."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import aiohttp
import orjson
import pytest

from asyncllm import AsyncLLMEngine
from asyncllm.engine import logprobs
from asyncllm.errors import InvalidRequestError
from asyncllm.server import completions
from asyncllm.server.http import bodies
from asyncllm.server.http.bodies import LARGE_BODY_BYTES, SLICE, sliced_json
from asyncllm.server.outputs import consumers as collect
from asyncllm.server.outputs.generation import PROMPTS_PER_TURN
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving
from tests.waiting import PATIENCE_SECONDS, until

LARGE = [{"role": "user", "content": "x" * 1000, "note": "y" * LARGE_BODY_BYTES}]
ITEM = {"type": "message", "role": "user", "content": "x" * 1000}


def note_threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each rendering ran on the loop."""
    on_loop: list[bool] = []
    render = FakeTokenizer.render_chat

    def noted(*args: Any, **kwargs: Any) -> str:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return render(*args, **kwargs)

    monkeypatch.setattr(FakeTokenizer, "render_chat", noted)
    return on_loop


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": LARGE, "max_tokens": 2}),
        ("/v1/chat/completions/batch", {"messages": [LARGE, HELLO], "max_tokens": 2}),
        ("/tokenize", {"messages": LARGE}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}] * 400, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}] * 400}),
        ("/v1/responses", {"input": [ITEM] * 10, "truncation": "auto", "max_output_tokens": 2}),
        ("/v1/responses/input_tokens", {"input": [ITEM] * 10}),
    ],
)
def test_large_chats_are_rendered_off_the_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.max_model_len = 2**20
        async with serving(engine) as server:
            assert server.service.reasons_by_default in (True, False)  # renders too, once
            on_loop = note_threads(monkeypatch)
            status, answer = await server.post(path, {"model": "fake", **body})
            assert status == 200, answer
        assert on_loop
        assert not any(on_loop)

    run(test())


def test_small_chats_are_rendered_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving() as server:
            on_loop = note_threads(monkeypatch)
            assert (await server.post(CHAT, {"messages": HELLO, "max_tokens": 2}))[0] == 200
            assert (await server.post("/tokenize", {"messages": HELLO}))[0] == 200
        assert on_loop == [True, True]

    run(test())


def test_a_conversation_that_is_kept_is_read_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving() as server:
            body = {"input": "Hi", "max_output_tokens": 2}
            _, first = await server.post("/v1/responses", body)
            on_loop = note_threads(monkeypatch)
            status, _ = await server.post(
                "/v1/responses", {**body, "previous_response_id": first["id"]}
            )
            named = {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]}
            assert (status, (await server.post("/v1/responses", body | named))[0]) == (200, 200)
        assert on_loop == [False, False]

    run(test())


def test_errors_in_the_thread_keep_their_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise InvalidRequestError("messages[0] is not good", "messages")

    async def test() -> None:
        async with serving() as server:
            monkeypatch.setattr(FakeTokenizer, "render_chat", refuse)
            status, answer = await server.post(CHAT, {"messages": LARGE})
            assert (status, answer["error"]["param"]) == (400, "messages")
            items = {"input": [ITEM] * 10}
            status, answer = await server.post("/v1/responses", items)
            assert (status, answer["error"]["param"]) == (400, "input")

    run(test())


def test_who_leaves_before_its_turn_is_never_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), []

    def slow(*args: Any, **kwargs: Any) -> str:
        begun.append(args)
        assert go.wait(PATIENCE_SECONDS)
        return "x"

    async def test() -> None:
        async with serving() as server:
            monkeypatch.setattr(FakeTokenizer, "render_chat", slow)
            first = asyncio.create_task(server.post(CHAT, {"messages": LARGE, "max_tokens": 2}))
            await until(lambda: begun)
            assert (await server.get("/health"))[0] == 200  # the loop is free
            before = len(asyncio.all_tasks())
            async with aiohttp.ClientSession() as leaver:
                gone = asyncio.create_task(leaver.post(server.url + CHAT, json={"messages": LARGE}))
                await until(lambda: server.off_loop._requests._work_queue.qsize() == 1)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
            await until(lambda: len(asyncio.all_tasks()) <= before)
            go.set()
            assert (await first)[0] == 200
        assert len(begun) == 1

    run(test())


def test_prompts_of_one_call_leave_turns_between_them() -> None:
    async def test() -> None:
        engine, ticks, seen = FakeEngine(), 0, []
        add = engine.add_request

        async def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append(ticks)
            return await add(*args, **kwargs)

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        engine.add_request = noted  # type: ignore[method-assign]
        async with serving(engine) as server:
            ticker = asyncio.create_task(tick())
            chats = {"messages": [HELLO] * 20, "max_tokens": 2}
            for path, body in (
                (COMPLETIONS, {"prompt": ["a"] * 20, "max_tokens": 2}),
                ("/v1/chat/completions/batch", chats),
            ):
                seen.clear()
                assert (await server.post(path, body))[0] == 200
                assert len(seen) == 20
                assert max(map(seen.count, seen)) <= PROMPTS_PER_TURN
            ticker.cancel()

    run(test())


# --- what a body may hold -----------------------------------------------------------------------


async def status_of(server: Server, raw: str) -> int:
    headers = {"Content-Type": "application/json"}
    async with server.session.post(server.url + CHAT, data=raw, headers=headers) as response:
        assert response.status == 200 or len((await response.json())["error"]) == 4
        return response.status


def test_the_values_of_a_body_are_limited_and_texts_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_VALUES", 40)

    async def test() -> None:
        async with serving() as server:
            body = '{"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}], "user": %s}'
            for many in ("[" + "[]," * 40 + "1]", '{"a":1,"b":1}', "1.5", "1e3", "1E3", '"x"'):
                value = many if len(many) > 40 else "[" + ",".join([many] * 40) + "]"
                assert await status_of(server, body % value) == (200 if many == '"x"' else 400)
            for text in ("[{:.eE" * 20, '\\"[[' * 30, "\\\\" * 50, "[" * 30 + '\\\\\\"' + "[" * 30):
                assert await status_of(server, body % f'"{text}"') == 200
            assert await status_of(server, "[" * 100) == 400
            assert await status_of(server, '{"a' + "e" * 100) == 400  # a string without an end

    run(test())


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("user", "[1e300, 1.5, -0.0]", 200),
        ("user", "[1e400]", 400),
        ("logit_bias", '{"5": 1e300}', 400),
        ("logit_bias", '{"5": 1e-300}', 200),
        ("logit_bias", '{"5": "1"}', 400),
        ("logit_bias", '{"5": true}', 400),
    ],
)
def test_numbers_are_read_by_python(field: str, value: str, status: int) -> None:
    """msgspec itself takes 12 us for an 1e300, which is 8 s for a body of them."""

    async def test() -> None:
        async with serving() as server:
            body = f'{{"max_tokens": 2, "messages": {json.dumps(HELLO)}, "{field}": {value}}}'
            assert await status_of(server, body) == status

    run(test())


def test_the_collector_rests_while_a_body_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(bodies, "_decoders", {})
    monkeypatch.setattr(bodies, "_finite", lambda digits: seen.append(gc.isenabled()))

    async def test() -> None:
        async with serving() as server:
            body = {"messages": HELLO, "max_tokens": 2, "user": 1.5, "metadata": "x" * 2**13}
            assert (await server.post(CHAT, body))[0] == 200

    assert gc.isenabled()
    run(test())
    assert seen == [False]
    assert gc.isenabled()


# --- large answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, SLICE, SLICE + 1, 3 * SLICE])
def test_slices_are_one_array(length: int) -> None:
    items = [{"a": i, "b": None} for i in range(length)]
    assert json.loads(orjson.dumps({"x": sliced_json(iter(items))})) == {"x": items}


def test_prompt_logprobs_of_all_choices_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_PROMPT_LOGPROB_ENTRIES", 24)
    one = {"prompt": [[7] * 4], "prompt_logprobs": 2, "max_tokens": 2, "n": 2}

    async def test() -> None:
        async with serving() as server:
            assert (await server.post(COMPLETIONS, one))[0] == 200
            for more in ({"n": 3}, {"prompt": [[7] * 4] * 2}):
                status, answer = await server.post(COMPLETIONS, one | more)
                assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")

    run(test())


def test_logprobs_of_all_answers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of one call and the conversations of a batch, too."""
    monkeypatch.setattr(logprobs, "MAX_OUTPUT_LOGPROB_ENTRIES", 24)
    chat = {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4}
    asked: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        (COMPLETIONS, {"prompt": ["a"] * 2, "logprobs": 2, "max_tokens": 4}, {"n": 2}, "logprobs"),
        (
            COMPLETIONS,
            {"prompt": ["a"] * 2, "logprobs": 2, "max_tokens": 4},
            {"prompt": ["a"] * 3},
            "logprobs",
        ),
        (f"{CHAT}/batch", {"messages": [HELLO] * 2, **chat}, {"messages": [HELLO] * 3},
         "top_logprobs"),
        (f"{CHAT}/batch", {"messages": [HELLO] * 2, **chat}, {"max_completion_tokens": None},
         "top_logprobs"),
    ]  # fmt: skip

    async def test() -> None:
        async with serving() as server:
            for path, most, more, param in asked:
                status, answer = await server.post(path, most)
                assert status == 200, answer
                status, answer = await server.post(path, most | more)
                assert (status, answer["error"]["param"]) == (400, param)
                assert "24" in answer["error"]["message"]

    run(test())


def test_the_engines_limit_of_logprobs_is_told_by_the_clients_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "MAX_OUTPUT_LOGPROB_ENTRIES", 24)
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "temperature": 0}
    response = {"input": "Hi", "top_logprobs": 5, "include": ["message.output_text.logprobs"]}
    params = {"logprobs": 5, "max_tokens": 5}
    asked: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {**chat, "max_tokens": 5}, "top_logprobs"),
        (CHAT, {**chat, "max_tokens": 5, "stream": True}, "top_logprobs"),
        ("/v1/responses", {**response, "max_output_tokens": 5}, "top_logprobs"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": params},
         "sampling_params.logprobs"),
    ]  # fmt: skip

    async def test() -> None:
        engine = AsyncLLMEngine("tiny", max_model_len=64, num_gpu_blocks_override=40)
        async with serving(engine) as server:
            for path, body, param in asked:
                status, answer = await server.post(path, body)
                assert (status, answer["error"]["param"]) == (400, param)
            status, answer = await server.post(CHAT, {**chat, "ignore_eos": True})
            assert status == 200, answer
            (choice,) = answer["choices"]
            assert (choice["finish_reason"], len(choice["logprobs"]["content"])) == ("length", 4)

    run(test())


def test_a_stream_echoes_few_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_STREAMED_ECHO_ENTRIES", 16)
    body = {"prompt": [7] * 4, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}

    async def test() -> None:
        async with serving() as server:
            assert (await server.events(COMPLETIONS, body))[-1] == "[DONE]"
            over = {**body, "logprobs": 2, "stream": True}
            async with server.session.post(server.url + COMPLETIONS, json=over) as response:
                text = await response.text()  # an error event, or a 400 if it was in time for that
            assert json.loads(text.removeprefix("data: "))["error"]["param"] == "echo"
            assert (await server.post(COMPLETIONS, body | {"logprobs": 2}))[0] == 200

    run(test())
