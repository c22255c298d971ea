"""POST /v1/chat/completions/batch: many conversations in one call, one choice for each (vLLM's).

A chat request whose `messages` is a list of conversations; the rest of it holds for each of them.
To the engine they are chats of their own; the first that fails, or a client that leaves, ends all.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.bodies import read_body
from asyncllm.server.call import Call
from asyncllm.server.chat_call import chat_call
from asyncllm.server.chat_view import ChatView
from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.sampling import client_names
from asyncllm.server.service import SERVICE, Service, answer_message, json_response

MAX_CONVERSATIONS = 1024  # of one call


class BatchChatRequest(ChatRequest, kw_only=True):
    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]


# What has no place in the answer of a batch -> the values that ask for nothing.
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
    with client_names(request):
        chats = []
        for messages in request.messages:
            chats.append(_chat(msgspec.structs.replace(request, messages=messages), service))
            await asyncio.sleep(0)  # a template takes its time: others have a turn between two
        bodies = await _answer_all(chats, service)
    return json_response(_body(bodies))


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


def _chat(request: ChatRequest, service: Service) -> tuple[Call, ChatView]:
    """Raises `ApiError`, `InvalidRequestError`."""
    call = chat_call(request, service)
    names = service.token_names(request)
    return call, ChatView(request, call, names, service.args.response_role)


async def _answer_all(chats: list[tuple[Call, ChatView]], service: Service) -> list[dict[str, Any]]:
    """A chat.completion of each. Raises what the first failure raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer_message(service, call)) for call, _ in chats]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [view.body(task.result()) for (_, view), task in zip(chats, tasks, strict=True)]


def _body(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """The first with everybody's choice, and the usage of all."""
    body = bodies[0]
    choices, usage = [], body["usage"]
    for index, one in enumerate(bodies):
        (choice,) = one["choices"]
        choices.append({**choice, "index": index})
        if "prompt_token_ids" in one:
            choices[-1]["prompt_token_ids"] = one.pop("prompt_token_ids")
        if index:
            usage = _sum(usage, one["usage"])
    return {**body, "choices": choices, "usage": usage}


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of each number in two usages; None where there is none."""
    return {
        name: _sum(value, other[name])
        if isinstance(value, dict)
        else (None if value is None else value + other[name])
        for name, value in one.items()
    }
