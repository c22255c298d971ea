"""POST /v1/chat/completions, and the chat request as the engine's work.

Every API that speaks in messages (chat, its batch, responses, Anthropic's) comes through
`chat_call`: the model, the prompt, the parser, the sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from aiohttp import web

from asyncllm.engine.text.prompt import TextPrompt
from asyncllm.errors import InvalidRequestError
from asyncllm.server.chat.response import ChatStream, ChatView
from asyncllm.server.http.bodies import prepare, read_body, render_response
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.call import Call, Usage, new_id
from asyncllm.server.inputs.output_format import chat_output
from asyncllm.server.inputs.prompts import chat_prompt, tool_use
from asyncllm.server.inputs.refusals import refuse_unsupported, sent_fields
from asyncllm.server.inputs.sampling import (
    chat_params,
    client_name,
    wants_outputs,
    with_client_name,
)
from asyncllm.server.outputs.chunks import ChunkStream
from asyncllm.server.outputs.consumers import MessageCollector, ParsedOutput
from asyncllm.server.outputs.generation import Consumer
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.service import (
    SERVICE,
    Service,
)
from asyncllm.server.tokenize import encode


async def chat_completions(
    http: web.Request, request: ChatRequest | None = None
) -> web.StreamResponse:
    """`request`: the body, where it has been read."""
    service = http.app[SERVICE]
    service.check_open()
    if request is None:
        request = await read_body(http, ChatRequest)
    if service.args.enable_force_include_usage:
        service.force_usage(request)
    try:
        call = await prepare(http, partial(chat_call, request, service))
        if request.stream:
            sse = SSEStream(http, service.frames)
            return await service.stream(
                sse, call, partial(_stream_consumer, sse, call, request, service)
            )
        messages = MessageCollector(call)
        await service.collect(call, partial(ParsedOutput, call, messages))
        view = chat_view(request, call, service)
        return await render_response(http, partial(view.body, messages), call.has_logprobs)
    except InvalidRequestError as error:
        raise with_client_name(error, request) from error


def chat_view(request: ChatRequest, call: Call, service: Service) -> ChatView:
    return ChatView(request, call, service.token_names(request), service.args.response_role)


def _stream_consumer(
    sse: SSEStream, call: Call, request: ChatRequest, service: Service
) -> Consumer:
    """A stream with nothing to parse passes half as many functions."""
    view, options = chat_view(request, call, service), request.stream_options
    if call.new_parser is None:
        return ChunkStream(sse, call, view, options)
    usage = Usage(call.shows_cached)
    return ParsedOutput(call, ChatStream(sse, call, view, options, usage), usage)


def chat_call(request: ChatRequest, service: Service) -> Call:
    """Raises `ApiError`, `InvalidRequestError` for what the client got wrong."""
    adapter = service.check_model(request.model)
    given = sent_fields(request)
    refuse_unsupported(request, given, service.args)
    tools = tool_use(request, service.args.exclude_tools_when_tool_choice_none)
    prompt = chat_prompt(request, tools, service)
    output = chat_output(request, tools, prompt["prompt"], service)
    params = chat_params(request, given, service.engine.input_processor, output)
    return Call(
        id=new_id("chatcmpl"),
        model=service.reported_name(adapter),
        adapter=adapter,
        prompts=[prompt],
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        new_parser=output.new_parser,
        return_token_ids=bool(request.return_token_ids),
        wants_outputs=wants_outputs(request),
        shows_cached=service.args.enable_prompt_tokens_details,
        client_name=partial(client_name, request),
    )


def message_call(
    request: ChatRequest, service: Service, call_id: str, names: Mapping[str, str]
) -> Call:
    """`names`: the API's own of the chat request's fields.

    May run in a thread. Raises `ApiError`, `InvalidRequestError`.
    """
    try:
        call = chat_call(request, service)
    except InvalidRequestError as error:
        raise with_client_name(error, request) from error

    def own_name(param: str | None) -> str | None:
        name = call.client_name(param)
        return name and names.get(name, name)

    return replace(call, id=call_id, client_name=own_name)


def render_prompt(request: ChatRequest, service: Service) -> TextPrompt:
    """May run in a thread. Raises `ApiError`, `InvalidRequestError`."""
    service.check_model(request.model)
    tools = tool_use(request, service.args.exclude_tools_when_tool_choice_none)
    return chat_prompt(request, tools, service)


async def num_tokens(prompt: TextPrompt, service: Service) -> int:
    tokenizer = service.engine.tokenizer
    return len(await encode(tokenizer, prompt["prompt"], bool(prompt.get("add_special_tokens"))))
