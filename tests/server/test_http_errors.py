"""Every refusal: its status, its four keys, and that nothing of it reached the engine."""

from __future__ import annotations

import asyncio
import gzip
import logging
from typing import Any

import orjson
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from asyncllm.server.http.errors import MAX_MESSAGE_CHARS
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.protocol import ChatRequest, CompletionRequest
from tests.server.fake_engine import MAX_MODEL_LEN, FakeEngine, reply
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def check(
    response: tuple[int, Any], status: int, param: str | None = None, code: str | None = None
) -> str:
    """The four keys, and the right values in them; returns the message."""
    assert response[0] == status, response
    assert set(response[1]) == {"error"}
    error = response[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert "Traceback" not in error["message"]
    assert "/" not in error["message"].replace("application/json", "")
    return error["message"]


async def raw(server: Server, body: bytes, path: str = CHAT, **headers: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", **headers}
    async with server.session.post(server.url + path, data=body, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 1000}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 2}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": None}, "messages"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        # What would change the answer and is not there is refused by name.
        ({"tools": [TOOL]}, "tools"),  # this model's format is not known
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {}}, "function_call"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": TOOL}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("g")}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": allowed("auto", "g")},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {"tools": [TOOL], "tool_choice": allowed("none", "f")},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools"),
        ({"tools": [{}], "tool_choice": named("f")}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice"),
        ({"tools": TOOL}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": []},
                }
            },
            "response_format",
        ),
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": 2}, "use_beam_search"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"truncation_side": "both"}, "truncation_side"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"verbosity": "low"}, "verbosity"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
)
def test_bad_fields(fields: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            response = await server.post(CHAT, {"messages": HELLO, **fields})
            check(response, 400, param)
            assert response[1]["error"]["type"] == "invalid_request_error"
            assert not server.engine.seen

    run(test())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": "warm"}, "temperature must be a number, got a string"),
        ({"max_tokens": 8.5}, "max_tokens must be an integer, got a fraction"),
        ({"stop": 7.5}, "stop must be a string or an array, got a fraction"),
        ({"messages": "hello"}, "messages must be an array, got a string"),
        ({"messages": [3]}, "messages[0] must be an object, got an integer"),
        ({"reasoning_effort": "lots"}, "reasoning_effort must be one of none, minimal, low, medium,"
         " high, xhigh, max, got 'lots'"),
        ({"structured_outputs": {"jsno": 1}}, "structured_outputs is not what this route takes: "
         "Object contains unknown field `jsno`"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_said_in_jsons_words(fields: dict[str, Any], said: str) -> None:
    async def test() -> None:
        async with serving() as server:
            _, answer = await server.post(CHAT, {"messages": HELLO, **fields})
            assert answer["error"]["message"] == said

    run(test())


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("max_tokens", 8.0, 8),
        ("max_tokens", "8", 8),
        ("temperature", "0.25", 0.25),
        ("ignore_eos", "true", True),
        ("ignore_eos", 1, True),
        ("stop", "7", ["7"]),
    ],
)
def test_numbers_and_booleans_may_be_spelt_in_strings(name: str, value: Any, taken: Any) -> None:
    """As in vLLM; and 8.0 is an integer in JSON Schema."""

    async def test() -> None:
        async with serving() as server:
            for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
                status, answer = await server.post(path, {**body, name: value})
                assert status == 200, answer
            assert [getattr(seen.params, name) for seen in server.engine.seen] == [taken] * 2
            for wrong in (8.5, "eight", "", "nan", [8]):
                check(
                    await server.post(CHAT, {"messages": HELLO, "max_tokens": wrong}),
                    400,
                    "max_tokens",
                )
            refused = await server.post(CHAT, {"messages": HELLO, "temperature": "nan"})
            check(refused, 400, "temperature")

    run(test())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": ["a"] * 33, "best_of": 32}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_bad_completion_fields(fields: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            check(await server.post(COMPLETIONS, {"prompt": "a", **fields}), 400, param)
            assert not server.engine.seen

    run(test())


def test_every_field_of_the_official_client_is_known() -> None:
    """So that one which changes the answer is refused, and never just ignored as unknown."""
    of_chat = set(chat_params.CompletionCreateParamsBase.__annotations__)
    assert of_chat <= set(ChatRequest.__struct_fields__)
    of_completions = set(completion_params.CompletionCreateParamsBase.__annotations__)
    assert of_completions <= set(CompletionRequest.__struct_fields__)


# Of vLLM's chat and completion requests, beside OpenAI's.
OF_VLLM = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words add_special_tokens response_format
    structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params
    ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval
""".split()  # noqa: SIM905
OF_VLLM_CHAT = """
    include_reasoning echo add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
""".split()  # noqa: SIM905


def test_every_field_of_vllm_is_known() -> None:
    assert {*OF_VLLM, *OF_VLLM_CHAT} <= set(ChatRequest.__struct_fields__)
    assert {*OF_VLLM, "prompt_embeds"} <= set(CompletionRequest.__struct_fields__)


def test_harmless_fields_are_taken() -> None:
    async def test() -> None:
        harmless = {
            "tools": [],
            "tool_choice": "none",
            "function_call": "none",
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "best_of": 1,
            "user": "me",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "prediction": {"type": "content", "content": "Answer"},
            "an_unknown_field": 1,
            "functions": None,
        }
        async with serving() as server:
            status, body = await server.post(CHAT, {"messages": HELLO, **harmless})
        assert status == 200, body

    run(test())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [], "temperature": 1e400}',
        b'{"messages": [], "n": ' + b"9" * 10_000 + b"}",
        b'{"messages": [{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b'\xef\xbb\xbf{"messages": []}',
    ],
)
def test_bad_bodies(body: bytes) -> None:
    async def test() -> None:
        async with serving() as server:
            status, answer = await raw(server, body)
            check((status, answer), 400, answer["error"]["param"])
            status, answer = await raw(server, body, "/tokenize")
            assert status == 400
            status, answer = await server.post(CHAT, {"messages": HELLO})
            assert status == 200

    run(test())


def test_missing_field_is_named() -> None:
    async def test() -> None:
        async with serving() as server:
            check(await server.post(CHAT, {}), 400, "messages")
            check(await server.post(COMPLETIONS, {}), 400, "prompt")
            check(await server.post("/detokenize", {}), 400, "tokens")
            check(await server.post("/tokenize", {}), 400, "prompt")
            refused = [await server.post(COMPLETIONS, body) for body in ({}, {"prompt": None})]
            assert {body["error"]["message"] for _, body in refused} == {"`prompt` is required"}

    run(test())


def test_content_type() -> None:
    async def test() -> None:
        body = orjson.dumps({"messages": HELLO})
        async with serving() as server:
            check(await raw(server, body, **{"Content-Type": "text/plain"}), 400)
            good = await raw(server, body, **{"Content-Type": "application/json; charset=utf-8"})
            assert good[0] == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                         % (CHAT.encode(), len(body), body))  # fmt: skip
            assert (await reader.readline()).split()[1] == b"400"  # none at all is none
            writer.close()

    run(test())


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-123_x.Y", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("é", False)],
)
def test_request_ids_are_echoed_where_they_are_harmless(given: str, echoed: bool) -> None:
    async def test() -> None:
        async with serving() as server:
            headers = {"X-Request-Id": given}
            for path, stream in (("/nowhere", False), (CHAT, False), (CHAT, True)):
                async with server.session.post(
                    server.url + path, json={"messages": HELLO, "stream": stream}, headers=headers
                ) as response:
                    assert response.headers.get("X-Request-Id") == (given if echoed else None)
            assert all(given not in request.request_id for request in server.engine.seen)

    run(test())


@pytest.mark.parametrize(
    ("num_prompts", "n", "param"),
    [(1024, 1, None), (1025, 1, "prompt"), (8, 128, None), (9, 128, "n"), (1, 129, "n")],
)
def test_prompts_and_choices_of_one_call(num_prompts: int, n: int, param: str | None) -> None:
    """At the limit, and one above."""

    async def test() -> None:
        async with serving() as server:
            body = {"prompt": ["a"] * num_prompts, "n": n, "max_tokens": 1}
            status, answer = await server.post(COMPLETIONS, body)
            if param is None:
                assert status == 200 and len(answer["choices"]) == num_prompts * n
            else:
                check((status, answer), 400, param)

    run(test())


def test_too_large() -> None:
    async def test() -> None:
        async with serving(max_body_bytes=1000) as server:
            over = orjson.dumps({"messages": [{"role": "user", "content": "x" * 1000}]})
            check(await raw(server, over), 413, code="request_too_large")

            async def chunks() -> Any:
                yield over

            async with server.session.post(
                server.url + CHAT, data=chunks(), headers={"Content-Type": "application/json"}
            ) as response:  # no Content-Length: noticed while reading
                check((response.status, await response.json()), 413)
            assert (await server.post(CHAT, {"messages": HELLO}))[0] == 200

    run(test())


def test_compressed_bodies() -> None:
    async def test() -> None:
        good = gzip.compress(orjson.dumps({"messages": HELLO}))
        bomb = gzip.compress(b'{"messages": "' + b"x" * 100_000 + b'"}')
        encoding = {"Content-Encoding": "gzip"}
        async with serving(max_body_bytes=10_000) as server:
            assert (await raw(server, good, **encoding))[0] == 200
            check(await raw(server, bomb, **encoding), 413)  # the decompressed size counts
            check(await raw(server, good[:20] + b"garbage" + good[20:], **encoding), 400)
            check(await raw(server, b"not gzip at all", **encoding), 400)
            check(await raw(server, good, **{"Content-Encoding": "x-unknown"}), 400)

    run(test())


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving() as server:
            for _ in range(2):
                body = {"messages": HELLO, "never_heard_of_it": 1}
                assert (await server.post(CHAT, body))[0] == 200

    with caplog.at_level(logging.DEBUG, "asyncllm.server.http.bodies"):
        run(test())
    assert caplog.text.count("never_heard_of_it") == 1


def test_routes_and_methods() -> None:
    async def test() -> None:
        async with serving() as server:
            status, body = await server.get("/v1/nothing")
            assert (status, body["error"]["code"]) == (404, "not_found")
            assert body["error"]["message"] == "there is no such route: GET /v1/nothing"
            status, body = await server.post("/v1/v1/x%ff%0ay", {})
            assert body["error"]["message"] == "there is no such route: POST /v1/v1/x%FF%0Ay"
            status, body = await server.get("/" + "x" * 6000)
            assert (status, len(body["error"]["message"])) == (404, MAX_MESSAGE_CHARS)
            check(await server.post("/v1/models", {}), 405, code="method_not_allowed")
            async with server.session.get(server.url + CHAT) as response:
                check((response.status, await response.json()), 405)
                assert response.headers["Allow"] == "POST"
                assert response.headers["Server"] == "asyncllm"  # and no versions

    run(test())


def test_unknown_model() -> None:
    async def test() -> None:
        async with serving() as server:
            for path, fields in (
                (CHAT, {"messages": HELLO}),
                (COMPLETIONS, {"prompt": "a"}),
                ("/tokenize", {"prompt": "a"}),
                ("/detokenize", {"tokens": [1]}),
            ):
                response = await server.post(path, {"model": "gpt-9", **fields})
                check(response, 404, "model", "model_not_found")
                response = await server.post(path, {"model": "fake-alias", **fields})
                assert response[0] == 200
                if "model" in response[1]:
                    assert response[1]["model"] == "fake"  # the first name is reported
            check(await server.get("/v1/models/gpt-9"), 404, "model", "model_not_found")
            long = await server.post(COMPLETIONS, {"prompt": "a", "model": "x" * 100_000})
            assert len(check(long, 404, "model")) <= MAX_MESSAGE_CHARS

    run(test())


def test_too_long() -> None:
    async def test() -> None:
        async with serving() as server:
            response = await server.post(CHAT, {"messages": HELLO, "max_tokens": 10**6})
            message = check(response, 400, "max_tokens", "context_length_exceeded")
            assert f"maximum context length is {MAX_MODEL_LEN} tokens" in message
            # A stream is refused just the same: nothing is sent before all is checked.
            response = await server.post(
                CHAT, {"messages": HELLO, "max_completion_tokens": 10**6, "stream": True}
            )
            check(response, 400, "max_completion_tokens", "context_length_exceeded")

    run(test())


def test_second_prompt_refused_frees_the_first() -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.go.clear()
            check(await server.post(COMPLETIONS, {"prompt": [[65], [999]]}), 400, "prompt")
            assert len(server.engine.seen) == 1
            assert not server.engine.live
            assert server.service.num_live == 0

    run(test())


def test_overload() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.max_queued = 0
        async with serving(engine) as server:
            url = server.url + CHAT
            async with server.session.post(url, json={"messages": HELLO}) as response:
                check((response.status, await response.json()), 429, code="rate_limit_exceeded")
                assert int(response.headers["Retry-After"]) >= 1

    run(test())


def test_not_ready_and_draining() -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.unhealthy = "the engine failed"
            check(await server.post(CHAT, {"messages": HELLO}), 503, code="service_unavailable")
            server.engine.unhealthy = None
            server.service.draining = True
            check(await server.post(CHAT, {"messages": HELLO}), 503)
            check(await server.post(COMPLETIONS, {"prompt": "a"}), 503)

    run(test())


def test_engine_failure() -> None:
    """Before the stream a status; after it began one error event, no [DONE], and a proper end."""

    async def test() -> None:
        failing = {"messages": [{"role": "user", "content": "<fail>"}]}
        async with serving() as server:
            url = server.url + CHAT
            async with server.session.post(url, json=failing) as response:
                message = check((response.status, await response.json()), 500)
                assert "the model failed" not in message  # may hold paths: it is logged
                assert response.headers["x-should-retry"] == "false"
            *chunks, last = await server.events(CHAT, failing)
            check((500, last), 500, code="internal_error")
            assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "Ans"
            # One of two prompts fails: the other one is aborted.
            events = await server.events(
                COMPLETIONS, {"prompt": ["<fail>", "b"], "max_tokens": 1000}
            )
            assert set(events[-1]) == {"error"}
            await server.quiet()
            assert len(server.engine.aborted) == 1

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_unexpected_failure_stays_with_its_request(stream: bool) -> None:
    """An output that cannot be rendered ends its request; the engine never sees an exception."""

    async def test() -> None:
        async with serving() as server:
            bad = {"messages": [{"role": "user", "content": "<raise>"}], "n": 2}
            other = asyncio.create_task(server.post(CHAT, {"messages": HELLO}))
            if stream:
                events = await server.events(CHAT, bad)
                assert events[-1]["error"]["message"] == "internal error"
            else:
                response = await server.post(CHAT, bad)
                assert check(response, 500, code="internal_error") == "internal error"
            assert (await other)[1]["choices"][0]["message"]["content"] == reply(0)
            await server.quiet()
            assert len(server.engine.aborted) == 1
            assert not server.engine.sink_errors

    run(test())


def test_sink_never_raises_into_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the error cannot be told to the client either."""

    def broken(self: SSEStream, frames: bytes) -> None:
        raise RuntimeError("no such transport")

    async def test() -> None:
        async with serving() as server:
            monkeypatch.setattr(SSEStream, "push", broken)
            server.engine.go.clear()  # until the stream has begun, and no status can tell the error
            body = {"messages": HELLO, "stream": True}
            async with server.session.post(server.url + CHAT, json=body) as response:
                server.engine.go.set()
                assert await response.text() == ""
            await server.quiet()
            assert len(server.engine.aborted) == 1
            assert not server.engine.sink_errors

    run(test())
