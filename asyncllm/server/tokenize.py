"""/tokenize, /detokenize, /tokenizer_info: tokenizer and chat template without the model."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web

from asyncllm.engine.text.tokenizer import LARGE_TEXT_CHARS, Tokenizer
from asyncllm.server.http.bodies import (
    json_response,
    prepare,
    read_body,
    render_response,
    sliced_json,
)
from asyncllm.server.http.errors import bad_request
from asyncllm.server.inputs.prompts import render_chat
from asyncllm.server.inputs.refusals import refuse_unsupported_tokenize
from asyncllm.server.protocol import DetokenizeRequest, TokenizeRequest
from asyncllm.server.service import SERVICE, Service

LARGE_TEXT_TOKENS = 4_000  # from here on decoding takes a millisecond: off the loop


async def tokenize(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    request = await read_body(http, TokenizeRequest)
    service.check_model(request.model)
    refuse_unsupported_tokenize(request, service.args)
    tokenizer = service.engine.tokenizer
    text, add_special_tokens = await prepare(http, partial(_text, request, service))
    ids = await encode(tokenizer, text, add_special_tokens)

    def body() -> dict[str, Any]:
        texts = map(tokenizer.token, ids) if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": service.engine.max_model_len,
            "tokens": sliced_json(ids),
            "token_strs": texts and sliced_json(texts),
        }

    return await render_response(http, body, len(ids) >= LARGE_TEXT_TOKENS)


async def detokenize(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    request = await read_body(http, DetokenizeRequest)
    service.check_model(request.model)
    vocab_size = service.engine.tokenizer.vocab_size
    if request.tokens and max(request.tokens) >= vocab_size:
        raise bad_request(f"tokens must be ids below {vocab_size}", "tokens")
    decode = service.engine.tokenizer.decode
    if len(request.tokens) < LARGE_TEXT_TOKENS:
        text = decode(request.tokens, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(decode, request.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def tokenizer_info(http: web.Request) -> web.Response:
    return json_response(http.app[SERVICE].engine.tokenizer.info())


def _text(request: TokenizeRequest, service: Service) -> tuple[str, bool]:
    """The text, and whether special tokens are added; a chat template writes its own."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    add_special_tokens = request.add_special_tokens
    if request.prompt is not None:
        return request.prompt, add_special_tokens is not False
    return render_chat(request, service, request.tools or []), bool(add_special_tokens)


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """A large text takes milliseconds: off the loop."""
    if len(text) >= LARGE_TEXT_CHARS:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    return tokenizer.encode(text, add_special_tokens)
