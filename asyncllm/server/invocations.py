"""POST /invocations: SageMaker's one route for all requests, told apart by their fields."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from asyncllm.server.chat.serving import chat_completions
from asyncllm.server.completions import completions
from asyncllm.server.http.bodies import read_body
from asyncllm.server.protocol import ChatRequest, CompletionRequest
from asyncllm.server.service import SERVICE

KINDS: Mapping[str, type[ChatRequest | CompletionRequest]] = {
    "messages": ChatRequest,
    "prompt": CompletionRequest,
}


async def invocations(http: web.Request) -> web.StreamResponse:
    http.app[SERVICE].check_open()
    request = await read_body(http, KINDS)
    if isinstance(request, ChatRequest):
        return await chat_completions(http, request)
    return await completions(http, request)
