"""A call for one answer in parts: its id is the API's own, its end a message, streamed or whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from aiohttp import web

from asyncllm.engine.text.prompt import TextPrompt
from asyncllm.errors import InvalidRequestError
from asyncllm.server.answer_events import AnswerSink
from asyncllm.server.answer_parts import PartsCollector
from asyncllm.server.call import Call
from asyncllm.server.chat_call import chat_call
from asyncllm.server.prompts import chat_prompt
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.sampling import client_named
from asyncllm.server.service import Service, collect, parsed, stream_to
from asyncllm.server.sse import SSEStream
from asyncllm.server.tokenize import encode
from asyncllm.server.tool_use import tool_use


def message_call(
    request: ChatRequest, service: Service, call_id: str, names: Mapping[str, str]
) -> Call:
    """`names`: the API's own of the chat request's fields.

    May run in a thread. Raises `ApiError`, `InvalidRequestError`.
    """
    try:
        call = chat_call(request, service)
    except InvalidRequestError as error:
        raise client_named(error, request) from error

    def own_name(param: str | None) -> str | None:
        name = call.client_name(param)
        return name and names.get(name, name)

    return replace(call, id=call_id, client_name=own_name)


async def answer_parts(service: Service, call: Call) -> PartsCollector:
    """The whole answer. Raises the `ApiError` that ended it."""
    collector = PartsCollector()
    await collect(service, call, partial(parsed, call, collector))
    return collector


async def stream_parts(
    sse: SSEStream, service: Service, call: Call, sink: AnswerSink
) -> web.StreamResponse:
    return await stream_to(sse, service, call, partial(parsed, call, sink))


def prompt_of(request: ChatRequest, service: Service) -> TextPrompt:
    """May run in a thread. Raises `ApiError`, `InvalidRequestError`."""
    service.check_model(request.model)
    tools = tool_use(request, service.args.exclude_tools_when_tool_choice_none)
    return chat_prompt(request, tools, service)


async def num_tokens(prompt: TextPrompt, service: Service) -> int:
    tokenizer = service.engine.tokenizer
    return len(await encode(tokenizer, prompt["prompt"], bool(prompt.get("add_special_tokens"))))
