"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from functools import partial

from aiohttp import web

from asyncllm.errors import ContextLengthError
from asyncllm.server.chat.serving import (
    message_call,
    num_tokens,
    render_prompt,
)
from asyncllm.server.http.bodies import json_response, prepare, read_body
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.refusals import rename_params
from asyncllm.server.messages.chat_request import FIELD_NAMES, chat_request, prompt_request
from asyncllm.server.messages.message import (
    REQUEST_ID_HEADER,
    MessageStream,
    MessageView,
    new_request_id,
)
from asyncllm.server.messages.openapi import StopReason
from asyncllm.server.messages.protocol import CountTokensRequest, MessagesRequest
from asyncllm.server.outputs.consumers import ParsedOutput
from asyncllm.server.outputs.parts import PartsCollector
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.service import SERVICE


async def messages(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, MessagesRequest)
    chat = await prepare(http, partial(chat_request, request))
    if service.answer_format is None or service.answer_format.reasoning is None:
        chat.thinking_token_budget = None  # clients send one to every model
    with rename_params(FIELD_NAMES):
        try:
            return await _answer(http, request, chat, "max_tokens")
        except ContextLengthError as error:
            if error.param != "max_tokens":
                raise
        # Clients send the same large limit whatever the prompt's length: at Anthropic
        # the message then has the room that there is, and reports it if that was too little.
        chat.max_completion_tokens = None
        return await _answer(http, request, chat, "model_context_window_exceeded")


async def _answer(
    http: web.Request, request: MessagesRequest, chat: ChatRequest, cut_off: StopReason
) -> web.StreamResponse:
    service, request_id = http.app[SERVICE], new_request_id()
    name = f"msg_{uuid.uuid4().hex}"
    call = await prepare(http, partial(message_call, chat, service, name, FIELD_NAMES))
    hides_thinking = request.thinking is not None and request.thinking.display == "omitted"
    view = MessageView(call, hides_thinking, cut_off)
    if request.stream:
        sse = SSEStream(http, service.frames)
        sse.response.headers[REQUEST_ID_HEADER] = request_id
        sink = MessageStream(sse, view, request_id)
        return await service.stream(sse, call, partial(ParsedOutput, call, sink))
    parts = PartsCollector()
    await service.collect(call, partial(ParsedOutput, call, parts))
    response = json_response(view.body(parts))
    response.headers[REQUEST_ID_HEADER] = request_id
    return response


async def count_tokens(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    request = await read_body(http, CountTokensRequest)
    with rename_params(FIELD_NAMES):
        prompt = await prepare(http, lambda: render_prompt(prompt_request(request), service))
        return json_response({"input_tokens": await num_tokens(prompt, service)})
