"""A grammar that leads its own text to where nothing satisfies it: a 400, however late it shows."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from asyncllm import (
    LLM,
    AsyncLLMEngine,
    InvalidRequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from asyncllm.engine.structured.compiler import GrammarCompiler
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving
from tests.server.test_http_tools import TEMPLATE
from tests.waiting import PATIENCE_SECONDS
from tests.waiting import run as run_on_asyncio

BATCH, GENERATE = f"{CHAT}/batch", "/inference/v1/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

LARK = 'start: "ab" "c" END\nEND: /a/ & /bbb/'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "grammar", "grammar": LARK},
        "end": "</a>",
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
SMALL: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 200}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# Of the fake engine, whose request ends after three tokens: path, body, the field to blame.
DEAD = user("<dead end>")
ASKED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": DEAD, "response_format": JSON_FORMAT}, "response_format"),
    (CHAT, {"messages": DEAD, "tools": [STRICT], "tool_choice": "required"}, "tools"),
    (
        CHAT,
        {"messages": DEAD, "functions": [STRICT["function"]], "function_call": {"name": "f"}},
        "functions",
    ),
    (
        CHAT,
        {"messages": DEAD, "structured_outputs": {"grammar": "start: /a+/"}},
        "structured_outputs.grammar",
    ),
    (COMPLETIONS, {"prompt": "<dead end>", "response_format": TAG}, "response_format"),
    (COMPLETIONS, {"prompt": ["a", "<dead end>"], "response_format": TAG}, "response_format"),
    (
        GENERATE,
        {
            "token_ids": list(b"<dead end>"),
            "sampling_params": {"structured_outputs": {"grammar": "start: /a+/"}},
        },
        "sampling_params.structured_outputs.grammar",
    ),
    (
        RESPONSES,
        {
            "input": "<dead end>",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        },
        "text",
    ),
    (
        RESPONSES,
        {
            "input": "<dead end>",
            "tools": [{"type": "function", **STRICT["function"]}],
            "tool_choice": "required",
        },
        "tools",
    ),
    (
        RESPONSES,
        {"input": "<dead end>", "structured_outputs": {"grammar": "start: /a+/"}},
        "structured_outputs.grammar",
    ),
    (
        MESSAGES,
        {
            "messages": DEAD,
            "max_tokens": 99,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        "output_config",
    ),
    (BATCH, {"messages": [HELLO, DEAD], "response_format": JSON_FORMAT}, "response_format"),
]


@pytest.mark.parametrize(("path", "body", "param"), ASKED)
def test_every_api_says_so(path: str, body: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.tokenizer.chat_template = TEMPLATE
            server.service.reasons_by_default = True
            status, answer = await server.post(path, body)
            assert status == 400
            check(path, answer, param)
            if path != BATCH:
                check_stream(path, await told(server, path, body), param)

    run(test())


async def told(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    has_names = path in (RESPONSES, MESSAGES)
    return await (server.named_events if has_names else server.events)(path, body)


def check(path: str, body: dict[str, Any], param: str) -> None:
    message = f"{param}: nothing may follow"
    if path == MESSAGES:
        assert body["type"] == "error"
        assert body["error"] == {"type": "invalid_request_error", "message": message}
    else:
        error = {"type": "invalid_request_error", "param": param, "code": None}
        assert body == {"error": {"message": message, **error}}


def check_stream(path: str, events: list[Any], param: str) -> None:
    """Some text, then the error, and nothing that ends an answer."""
    assert len(events) > 1 and "[DONE]" not in events
    if path == RESPONSES:
        assert events[-1]["type"] == "response.failed"
        response = events[-1]["response"]
        message = f"{param}: nothing may follow"
        assert response["status"] == "failed"
        assert response["error"] == {"code": "invalid_prompt", "message": message}
    else:
        check(path, events[-1], param)


REAL: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": HELLO, "structured_outputs": {"grammar": LARK}}, "structured_outputs"),
    (CHAT, {"messages": HELLO, "response_format": TAG}, "response_format"),
    (COMPLETIONS, {"prompt": "Hi", "structured_outputs": {"grammar": LARK}}, "structured_outputs"),
    (RESPONSES, {"input": "Hi", "structured_outputs": {"grammar": LARK}}, "structured_outputs"),
]


@pytest.mark.slow
def test_the_engine_says_so_and_others_go_on() -> None:
    async def test() -> None:
        other = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
        async with serving(AsyncLLMEngine("tiny", **SMALL)) as server:
            expected = await server.post(COMPLETIONS, other)
            beside = asyncio.create_task(server.post(COMPLETIONS, other))
            for path, body, param in REAL:
                status, answer = await server.post(path, body)
                assert status == 400
                error = answer["error"]
                assert error["type"] == "invalid_request_error"
                assert error["param"].startswith(param)
                assert error["message"].startswith(f"{error['param']}: the text came to")
                events = await told(server, path, body)
                said = events[-1].get("response", events[-1])["error"]
                assert said["message"] == error["message"]
            status, answer = await beside
            assert (status, answer["choices"]) == (200, expected[1]["choices"])

    run(test())


FORBIDS: dict[str, Any] = {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 3}


def test_who_forbids_every_token_gets_a_400_too() -> None:
    asked = [
        (CHAT, {"messages": HELLO, **FORBIDS, "top_p": 0.9}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": ["Hi", "you"], **FORBIDS}, "allowed_token_ids"),
        (GENERATE, {"token_ids": [5, 6], "sampling_params": FORBIDS},
         "sampling_params.allowed_token_ids"),
    ]  # fmt: skip

    async def test() -> None:
        async with serving(AsyncLLMEngine("tiny", **SMALL)) as server:
            for path, body, param in asked:
                status, answer = await server.post(path, body)
                assert (status, answer["error"]["param"]) == (400, param)
                assert answer["error"]["type"] == "invalid_request_error"

    run(test())


UNSATISFIABLE = {"type": "string", "pattern": "^a$", "minLength": 3}


@pytest.mark.slow
@pytest.mark.parametrize("parser", ["qwen3_coder", "gemma4", "hermes"])
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_strict_text_that_nothing_satisfies_is_refused_before_anything_is_queued(
    parser: str, tool_choice: str
) -> None:
    """As tags, as literals and as JSON, in a call that must come and in one that may."""

    async def test() -> None:
        properties = {"fine": {"type": "string", "minLength": 3}, "x": UNSATISFIABLE}
        parameters = {"type": "object", "properties": properties, "required": ["x"],
                      "additionalProperties": False}  # fmt: skip
        tool = {"name": "f", "parameters": parameters, "strict": True}
        chat = {
            "messages": HELLO,
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": tool_choice,
        }
        async with serving(AsyncLLMEngine("tiny", **SMALL), tool_call_parser=parser) as server:
            for more in ({}, {"stream": True}, {"response_format": {"type": "json_object"}}):
                status, answer = await server.post(CHAT, {**chat, **more})
                assert status == 400, answer
                param = "response_format" if "response_format" in more else "tools"
                assert answer["error"]["param"] == param
                assert "'x'" in answer["error"]["message"]
                assert "\n" not in answer["error"]["message"]
            response = {
                "input": "Hi",
                "tools": [{"type": "function", **tool}],
                "tool_choice": tool_choice,
            }
            status, answer = await server.post(RESPONSES, response)
            assert (status, answer["error"]["param"]) == (400, "tools")

    run(test())


def test_who_waits_for_the_same_grammar_is_told_of_its_own_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = {"type": "array", "items": UNSATISFIABLE, "minItems": 1}
    asked: list[dict[str, Any]] = [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
        {"structured_outputs": {"json": schema}},
    ]
    all_wait = threading.Event()
    compile_now = GrammarCompiler._compile
    num_found = itertools.count(1)
    find = GrammarCompiler._find_or_start

    def find_one(self: GrammarCompiler, params: Any) -> Any:
        found = find(self, params)
        if next(num_found) == 2 * len(asked):
            all_wait.set()
        return found

    def compile_late(self: GrammarCompiler, params: Any) -> Any:
        assert all_wait.wait(PATIENCE_SECONDS)
        return compile_now(self, params)

    monkeypatch.setattr(GrammarCompiler, "_find_or_start", find_one)
    monkeypatch.setattr(GrammarCompiler, "_compile", compile_late)

    async def test() -> None:
        async with serving(AsyncLLMEngine("tiny", **SMALL)) as server:
            answers = await asyncio.gather(
                *(server.post(CHAT, {"messages": HELLO, **fields}) for fields in asked * 2)
            )
        params = [answer["error"]["param"] for _, answer in answers]
        assert params == ["response_format", "structured_outputs.json"] * 2

    run(test())


@pytest.mark.parametrize(
    "content",
    [
        {"type": "regex", "pattern": "b[^\\s\\S]"},
        {"type": "json_schema", "json_schema": UNSATISFIABLE},
    ],
    ids=["regex", "schema"],
)
def test_what_nothing_satisfies_behind_a_tag_is_refused(content: dict[str, Any]) -> None:
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    wanted = {"type": "structural_tag", "format": tag}

    async def test() -> None:
        async with serving(AsyncLLMEngine("tiny", **SMALL)) as server:
            body = {"messages": HELLO, "response_format": wanted, "stream": True}
            status, answer = await server.post(CHAT, body)
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert "atisf" in answer["error"]["message"]

    run(test())


PARAMS = SamplingParams(max_tokens=50, structured_outputs=StructuredOutputsParams(grammar=LARK))


def test_python_callers_get_an_invalid_request_error() -> None:
    async def test() -> None:
        async with AsyncLLMEngine("tiny", **SMALL) as engine:
            with pytest.raises(InvalidRequestError, match="the text came to") as found:
                await engine.generate("Hi", PARAMS)
            assert found.value.param == "structured_outputs.grammar"
            seen = ""
            with pytest.raises(ValueError, match="the text came to"):
                async for output in engine.generate("Hi", PARAMS):
                    seen = output.outputs[0].text
            assert seen == "abc"
            engine.check_idle()

    run_on_asyncio(test())


def test_offline_callers_too() -> None:
    with LLM("tiny", **SMALL) as llm:
        with pytest.raises(InvalidRequestError, match="the text came to"):
            llm.generate("Hi", PARAMS, use_tqdm=False)
        (output,) = llm.generate("Hi", SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.finished
