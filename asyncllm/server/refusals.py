"""Fields that change the answer and do nothing here yet: refused by name, never ignored.

A table, so that a feature that arrives deletes its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.server.args import ServerArgs
from asyncllm.server.client_fields import Refusals, asks_nothing, refuse, sent
from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)

_COMMON: Refusals = {
    "logits_processors": asks_nothing,
    "truncation_side": lambda value: value == "left",
    "watermarking": asks_nothing,
    "kv_transfer_params": asks_nothing,
    "ec_transfer_params": asks_nothing,
    "vllm_xargs": asks_nothing,
}
_CHAT: Refusals = {
    **_COMMON,
    "audio": asks_nothing,
    "modalities": lambda value: value == ["text"],
    "moderation": asks_nothing,
    "verbosity": lambda value: value == "medium",
    "web_search_options": lambda value: False,
    "mm_processor_kwargs": asks_nothing,
    "media_io_kwargs": asks_nothing,
}
_COMPLETION: Refusals = {
    **_COMMON,
    "suffix": asks_nothing,
    "prompt_embeds": asks_nothing,
}
_TOKENIZE: Refusals = {
    "mm_processor_kwargs": asks_nothing,
    "media_io_kwargs": asks_nothing,
}
# vLLM's former names, and where their values go now
_MOVED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}


def refuse_unsupported(
    request: ChatRequest | CompletionRequest, given: Mapping[str, Any], args: ServerArgs
) -> None:
    """Raises `ApiError` 400 for the first field that asks for what is not there.

    given: what of the request was `sent`.
    """
    if moved := _MOVED.keys() & given.keys():
        name = min(moved)
        raise bad_request(f"{name} is not supported: send {_MOVED[name]}", name)
    if isinstance(request, ChatRequest):
        refuse(given, _CHAT)
        _refuse_template(request, args)
    else:
        refuse(given, _COMPLETION)


def refuse_unsupported_tokenize(request: TokenizeRequest, args: ServerArgs) -> None:
    refuse(sent(request), _TOKENIZE)
    _refuse_template(request, args)


def _refuse_template(request: ChatRequest | TokenizeRequest, args: ServerArgs) -> None:
    if request.chat_template and not args.trust_request_chat_template:
        raise bad_request(
            "a chat_template of the request's own needs --trust-request-chat-template",
            "chat_template",
        )
