"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from functools import partial

from aiohttp import web

from asyncllm.errors import ContextLengthError
from asyncllm.server.bodies import read_body
from asyncllm.server.client_fields import named_as
from asyncllm.server.message_call import (
    answer_parts,
    message_call,
    num_tokens,
    prompt_of,
    stream_parts,
)
from asyncllm.server.messages.answer import MessageView
from asyncllm.server.messages.answer_types import StopReason
from asyncllm.server.messages.chat_form import FIELD_NAMES, chat_request, prompt_request
from asyncllm.server.messages.errors import REQUEST_ID_HEADER, new_request_id
from asyncllm.server.messages.protocol import CountTokensRequest, MessagesRequest
from asyncllm.server.messages.stream import StreamedMessage
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.service import SERVICE, json_response, prepared
from asyncllm.server.sse import SSEStream


async def messages(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, MessagesRequest)
    chat = await prepared(http, partial(chat_request, request))
    if service.answer_format is None or service.answer_format.reasoning is None:
        chat.thinking_token_budget = None  # clients send one to every model
    with named_as(FIELD_NAMES):
        try:
            return await _answer(http, request, chat, "max_tokens")
        except ContextLengthError as error:
            if error.param != "max_tokens":
                raise
        # Clients send the same large limit whatever the prompt's length: Anthropic's answers then
        # have the room that there is, and say so if that was too little.
        chat.max_completion_tokens = None
        return await _answer(http, request, chat, "model_context_window_exceeded")


async def _answer(
    http: web.Request, request: MessagesRequest, chat: ChatRequest, cut_off: StopReason
) -> web.StreamResponse:
    service, request_id = http.app[SERVICE], new_request_id()
    name = f"msg_{uuid.uuid4().hex}"
    call = await prepared(http, partial(message_call, chat, service, name, FIELD_NAMES))
    hides_thinking = request.thinking is not None and request.thinking.display == "omitted"
    view = MessageView(call, hides_thinking, cut_off)
    if request.stream:
        sse = SSEStream(http, service.frames)
        sse.response.headers[REQUEST_ID_HEADER] = request_id
        return await stream_parts(sse, service, call, StreamedMessage(sse, view, request_id))
    response = json_response(view.body(await answer_parts(service, call)))
    response.headers[REQUEST_ID_HEADER] = request_id
    return response


async def count_tokens(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    request = await read_body(http, CountTokensRequest)
    with named_as(FIELD_NAMES):
        prompt = await prepared(http, lambda: prompt_of(prompt_request(request), service))
        return json_response({"input_tokens": await num_tokens(prompt, service)})
