"""From a chat request to the engine's work: the model, the prompt, the sampling parameters.

Every API that speaks in messages (chat, responses, Anthropic's) comes through here.
"""

from __future__ import annotations

from asyncllm.server.call import Call, new_id
from asyncllm.server.prompts import chat_prompt
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.refusals import refuse_unsupported
from asyncllm.server.sampling import chat_params
from asyncllm.server.service import Service


def chat_call(request: ChatRequest, service: Service, id_prefix: str = "chatcmpl") -> Call:
    """Raises `ApiError`, `InvalidRequestError` for what the client got wrong."""
    service.check_model(request.model)
    refuse_unsupported(request)
    params = chat_params(request, service.engine.input_processor)
    return Call(
        id=new_id(id_prefix),
        model=service.model_names[0],
        prompts=[chat_prompt(request, service.engine.tokenizer)],
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        return_token_ids=bool(request.return_token_ids),
    )
