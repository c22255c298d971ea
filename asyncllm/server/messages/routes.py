"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid

from aiohttp import web

from asyncllm.server.answer_events import ParsedAnswer
from asyncllm.server.bodies import read_body
from asyncllm.server.client_fields import named_as
from asyncllm.server.message_call import answer_parts, message_call
from asyncllm.server.messages.answer import message_body
from asyncllm.server.messages.chat_form import FIELD_NAMES, chat_request, prompt_request
from asyncllm.server.messages.errors import REQUEST_ID_HEADER, new_request_id
from asyncllm.server.messages.protocol import CountTokensRequest, MessagesRequest
from asyncllm.server.messages.stream import StreamedMessage
from asyncllm.server.prompts import render_chat
from asyncllm.server.service import SERVICE, json_response, stream_to
from asyncllm.server.sse import SSEStream
from asyncllm.server.tokenize import encode


async def messages(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, MessagesRequest)
    request_id = new_request_id()
    hide_thinking = request.thinking is not None and request.thinking.display == "omitted"
    chat = chat_request(request)
    with named_as(FIELD_NAMES):
        call, new_parser = message_call(chat, service, f"msg_{uuid.uuid4().hex}")
        if request.stream:
            sse = SSEStream(http, service.frames)
            sse.response.headers[REQUEST_ID_HEADER] = request_id
            sink = StreamedMessage(sse, call, request_id, hide_thinking)
            return await stream_to(sse, service, call, ParsedAnswer(call, new_parser, sink))
        answer = await answer_parts(service, call, new_parser)
    response = json_response(message_body(call, answer, hide_thinking))
    response.headers[REQUEST_ID_HEADER] = request_id
    return response


async def count_tokens(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    request = await read_body(http, CountTokensRequest)
    service.check_model(request.model)
    chat = prompt_request(request)
    with named_as(FIELD_NAMES):
        text = render_chat(chat, service, chat.tools or [])
    ids = await encode(service.engine.tokenizer, text, add_special_tokens=False)
    return json_response({"input_tokens": len(ids)})
