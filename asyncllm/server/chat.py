"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.server.bodies import read_body
from asyncllm.server.call import Call
from asyncllm.server.chat_call import chat_call
from asyncllm.server.collect import CollectedAnswer, CollectedChoice
from asyncllm.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.sampling import client_names
from asyncllm.server.service import (
    SERVICE,
    answer_stream,
    answer_whole,
    json_response,
)
from asyncllm.server.stream import ChoiceFrames


async def chat_completions(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, ChatRequest)
    names = TokenNames(service.engine.tokenizer, bool(request.return_tokens_as_token_ids))
    with client_names(request):
        call = chat_call(request, service)
        if request.stream:
            return await answer_stream(http, service, call, request, ChatChunks(call, names))
        answer = await answer_whole(service, call)
    return json_response(_body(call, answer, names))


class ChatChunks:
    """The `ChunkShape` of chat.completion.chunk."""

    object_name = "chat.completion.chunk"
    before_text = b'"delta":{"content":'
    after_text = b"}"

    def __init__(self, call: Call, names: TokenNames) -> None:
        self._num_top = call.params.logprobs
        self._names = names

    def opening(self, frames: ChoiceFrames, output: RequestOutput) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return frames.choice({"delta": delta, "logprobs": None, "finish_reason": None})

    def text(self, completion: CompletionOutput) -> str:
        return completion.text

    def logprobs(self, choice_index: int, completion: CompletionOutput) -> Any:
        if self._num_top is None or not completion.logprobs:
            return None
        return chat_logprobs(completion.logprobs, self._num_top, self._names)


def _body(call: Call, answer: CollectedAnswer, names: TokenNames) -> dict[str, Any]:
    body = {
        "id": call.id,
        "object": "chat.completion",
        "created": call.created,
        "model": call.model,
        "choices": [_choice(call, choice, names) for choice in answer.choices],
        "usage": answer.usage.as_dict(),
    }
    if call.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(answer.prompts[0].logprobs, names)
    return body


def _choice(call: Call, choice: CollectedChoice, names: TokenNames) -> dict[str, Any]:
    num_top = call.params.logprobs
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None if num_top is None else chat_logprobs(choice.logprobs, num_top, names),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
