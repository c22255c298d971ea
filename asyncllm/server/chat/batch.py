"""POST /v1/chat/completions/batch: many conversations in one call, one choice for each (vLLM's).

A chat request whose `messages` is a list of conversations; the rest of it holds for each of them.
To the engine they are chats of their own; the first that fails, or a client that leaves, ends all.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from asyncllm.engine.logprobs import check_output_logprobs
from asyncllm.errors import InvalidRequestError
from asyncllm.server.chat.response import ChatView
from asyncllm.server.chat.serving import chat_call, chat_view
from asyncllm.server.http.bodies import OFF_LOOP, read_body, render_response
from asyncllm.server.http.errors import bad_request
from asyncllm.server.inputs.call import Call
from asyncllm.server.inputs.sampling import with_client_name
from asyncllm.server.outputs.consumers import MessageCollector, ParsedOutput
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.service import SERVICE, Service

MAX_CONVERSATIONS = 1024  # of one call


class BatchChatRequest(ChatRequest, kw_only=True):
    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]


# Fields that a batch has no place for -> the values that change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "n": (None, 1),
    "tools": (None, []),
    "functions": (None, []),
    "prompt_logprobs": (None,),
    "return_prompt_text": (None, False),
}


async def chat_completions_batch(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, BatchChatRequest)
    _check(request)
    try:
        # Each of a thousand is a template's text: off the loop, however small they are.
        calls, views = await http.app[OFF_LOOP].read(partial(_chats, request, service))
        params = calls[0].params
        most = params.max_tokens or service.engine.max_model_len
        check_output_logprobs(params, most, len(calls))
        answers = await _answer_all(calls, service)
    except InvalidRequestError as error:
        raise with_client_name(error, request) from error
    return await render_response(http, partial(_body, views, answers), calls[0].has_logprobs)


def _check(request: BatchChatRequest) -> None:
    for name, harmless in REFUSED.items():
        if getattr(request, name) not in harmless:
            raise bad_request(f"{name} is not supported for a batch", name)
    num = len(request.messages)
    if not 1 <= num <= MAX_CONVERSATIONS:
        raise bad_request(f"{num} conversations, 1 to {MAX_CONVERSATIONS} in one call", "messages")
    if num * (request.best_of or 1) > MAX_CONVERSATIONS:
        asked = f"{num} conversations with best_of={request.best_of}"
        raise bad_request(f"{asked}, at most {MAX_CONVERSATIONS} answers", "best_of")


def _chats(request: BatchChatRequest, service: Service) -> tuple[list[Call], list[ChatView]]:
    """Raises `ApiError`, `InvalidRequestError`."""
    requests = [msgspec.structs.replace(request, messages=one) for one in request.messages]
    calls = [chat_call(one, service) for one in requests]
    return calls, [chat_view(*each, service) for each in zip(requests, calls, strict=True)]


async def _answer(call: Call, service: Service) -> MessageCollector:
    messages = MessageCollector(call)
    await service.collect(call, partial(ParsedOutput, call, messages))
    return messages


async def _answer_all(calls: list[Call], service: Service) -> list[MessageCollector]:
    """Raises what the first failure raised."""
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                tasks.append(group.create_task(_answer(call, service)))
                await asyncio.sleep(0)  # it is queued; others have a turn before the next
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _body(views: list[ChatView], answers: list[MessageCollector]) -> dict[str, Any]:
    """The first body with the choices of all, and their usage."""
    bodies = [view.body(answer) for view, answer in zip(views, answers, strict=True)]
    body = bodies[0]
    choices, usage = [], body["usage"]
    for index, one in enumerate(bodies):
        (choice,) = one["choices"]
        choices.append({**choice, "index": index})
        choices[-1]["prompt_token_ids"] = one.pop("prompt_token_ids")
        if index:
            usage = _sum(usage, one["usage"])
    return {**body, "choices": choices, "usage": usage}


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Add each number of two usages; None where there is none."""
    return {
        name: _sum(value, other[name])
        if isinstance(value, dict)
        else (None if value is None else value + other[name])
        for name, value in one.items()
    }
