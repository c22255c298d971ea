"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from asyncllm.errors import InvalidRequestError
from asyncllm.server.answer_events import ParsedAnswer
from asyncllm.server.bodies import read_body
from asyncllm.server.call import Call
from asyncllm.server.chat_call import chat_call
from asyncllm.server.chat_events import ChatEvents
from asyncllm.server.chat_view import ChatView
from asyncllm.server.generation import Consumer
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.sampling import client_named
from asyncllm.server.service import (
    SERVICE,
    Service,
    answer_message,
    answer_response,
    prepared,
    stream_to,
)
from asyncllm.server.sse import SSEStream
from asyncllm.server.stream import StreamedAnswer
from asyncllm.server.usage import Usage


async def chat_completions(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, ChatRequest)
    try:
        call = await prepared(http, partial(chat_call, request, service))
        if request.stream:
            sse = SSEStream(http, service.frames)
            answer = partial(_streamed, sse, call, request, service)
            return await stream_to(sse, service, call, answer)
        answered = await answer_message(service, call)
        view = _view(request, call, service)
        return await answer_response(service, call, partial(view.body, answered))
    except InvalidRequestError as error:
        raise client_named(error, request) from error


def _view(request: ChatRequest, call: Call, service: Service) -> ChatView:
    return ChatView(request, call, service.token_names(request), service.args.response_role)


def _streamed(sse: SSEStream, call: Call, request: ChatRequest, service: Service) -> Consumer:
    """A stream with nothing to parse has a way that is half as long."""
    view, options = _view(request, call, service), request.stream_options
    if call.new_parser is None:
        return StreamedAnswer(sse, call, view, options)
    usage = Usage(call.shows_cached)
    events = ChatEvents(sse, call, view, options, usage)
    return ParsedAnswer(call, call.new_parser, events, usage)
