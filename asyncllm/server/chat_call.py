"""From a chat request to the engine's work: the model, the prompt, the sampling parameters.

Every API that speaks in messages (chat, responses, Anthropic's) comes through here.
"""

from __future__ import annotations

from functools import partial

from asyncllm.server.answer_reading import answer_reading
from asyncllm.server.call import Call, new_id
from asyncllm.server.client_fields import sent
from asyncllm.server.prompts import chat_prompt
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.refusals import refuse_unsupported
from asyncllm.server.sampling import chat_params, client_name, wants_outputs
from asyncllm.server.service import Service
from asyncllm.server.tool_use import tool_use


def chat_call(request: ChatRequest, service: Service) -> Call:
    """Raises `ApiError`, `InvalidRequestError` for what the client got wrong."""
    service.check_model(request.model)
    given = sent(request)
    refuse_unsupported(request, given, service.args)
    tools = tool_use(request, service.args.exclude_tools_when_tool_choice_none)
    prompt = chat_prompt(request, tools, service)
    reading = answer_reading(request, tools, prompt["prompt"], service)
    params = chat_params(request, given, service.engine.input_processor, reading)
    return Call(
        id=new_id("chatcmpl"),
        model=service.model_names[0],
        prompts=[prompt],
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        new_parser=reading.new_parser,
        return_token_ids=bool(request.return_token_ids),
        wants_outputs=wants_outputs(request),
        shows_cached=service.args.enable_prompt_tokens_details,
        client_name=partial(client_name, request),
    )
