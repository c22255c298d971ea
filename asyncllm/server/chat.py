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
        self._call = call
        self._names = names

    def opening(self, frames: ChoiceFrames, output: RequestOutput) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"delta": delta, "logprobs": None, "finish_reason": None}
        wants_ids = self._call.return_token_ids
        return frames.choice(choice, output.prompt_token_ids if wants_ids else None)

    def text(self, completion: CompletionOutput) -> str:
        return completion.text

    def logprobs(self, choice_index: int, completion: CompletionOutput) -> Any:
        if self._call.params.logprobs is None or not completion.logprobs:
            return None
        return chat_logprobs(completion.logprobs, self._call.params, self._names)

    def token_ids(self, completion: CompletionOutput) -> list[int]:
        return completion.token_ids


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
    if call.return_token_ids:
        body["prompt_token_ids"] = answer.prompts[0].token_ids
    return body


def _choice(call: Call, choice: CollectedChoice, names: TokenNames) -> dict[str, Any]:
    wants_logprobs = call.params.logprobs is not None
    fields = {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": (
            chat_logprobs(choice.logprobs, call.params, names) if wants_logprobs else None
        ),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if call.return_token_ids:
        fields["token_ids"] = choice.token_ids
    return fields
