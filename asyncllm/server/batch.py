"""POST /v1/chat/completions/batch: many conversations in one call, one choice for each (vLLM's).

A chat request whose `messages` is a list of conversations; everything else of it holds for each.
They are one call to the engine, so the client's departure ends them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.bodies import read_body
from asyncllm.server.call import Call
from asyncllm.server.chat import chat_body
from asyncllm.server.chat_call import chat_call
from asyncllm.server.errors import bad_request
from asyncllm.server.logprobs import TokenNames
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.sampling import client_names
from asyncllm.server.service import SERVICE, Service, answer_whole, json_response

MAX_CONVERSATIONS = 1024  # of one call


class BatchChatRequest(ChatRequest, kw_only=True):
    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]


# Field -> the values that ask for nothing. The rest is chat's to refuse.
REFUSED: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "n": (None, 1),
    "tools": (None, []),
    "functions": (None, []),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
}


async def chat_completions_batch(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, BatchChatRequest)
    with client_names(request):
        call = await _call(request, service)
        answer = await answer_whole(service, call)
    names = TokenNames(service.engine.tokenizer, bool(request.return_tokens_as_token_ids))
    return json_response(chat_body(call, answer, names))


async def _call(request: BatchChatRequest, service: Service) -> Call:
    """Raises `ApiError`, `InvalidRequestError`."""
    for name, harmless in REFUSED.items():
        if getattr(request, name) not in harmless:
            raise bad_request(f"{name} is not supported for a batch", name)
    num = len(request.messages)
    if not 1 <= num <= MAX_CONVERSATIONS:
        raise bad_request(f"{num} conversations, 1 to {MAX_CONVERSATIONS} in one call", "messages")
    calls = []
    for messages in request.messages:
        calls.append(chat_call(msgspec.structs.replace(request, messages=messages), service))
        await asyncio.sleep(0)  # a template takes its time: others have their turn between two
    return dataclasses.replace(calls[0], prompts=[call.prompts[0] for call in calls])
