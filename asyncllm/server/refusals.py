"""Fields that change the answer and do nothing here yet: refused by name, never ignored.

A table, so that a feature that arrives deletes its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncllm.server.args import ServerArgs
from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)

_Harmless = Callable[[Any], bool]


def _empty(value: Any) -> bool:
    return not value


# field -> the values that ask for nothing (None always does)
_COMMON: dict[str, _Harmless] = {
    "logits_processors": _empty,
    "truncation_side": lambda value: value == "left",
    "watermarking": _empty,
    "kv_transfer_params": _empty,
    "ec_transfer_params": _empty,
    "vllm_xargs": _empty,
}
_CHAT: dict[str, _Harmless] = {
    "audio": _empty,
    "modalities": lambda value: value == ["text"],
    "moderation": _empty,
    "verbosity": lambda value: value == "medium",
    "web_search_options": lambda value: False,
    "mm_processor_kwargs": _empty,
    "media_io_kwargs": _empty,
}
_COMPLETION: dict[str, _Harmless] = {
    "suffix": _empty,
    "prompt_embeds": _empty,
}
_TOKENIZE: dict[str, _Harmless] = {
    "mm_processor_kwargs": _empty,
    "media_io_kwargs": _empty,
}
# vLLM's former names, and where their values go now
_MOVED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}


def refuse_unsupported(request: ChatRequest | CompletionRequest, args: ServerArgs) -> None:
    """Raises `ApiError` 400 for the first field that asks for what is not there."""
    _refuse(request, _COMMON)
    for name, now in _MOVED.items():
        if getattr(request, name) is not None:
            raise bad_request(f"{name} is not supported: send {now}", name)
    if isinstance(request, ChatRequest):
        _refuse(request, _CHAT)
        _refuse_template(request, args)
    else:
        _refuse(request, _COMPLETION)


def refuse_unsupported_tokenize(request: TokenizeRequest, args: ServerArgs) -> None:
    _refuse(request, _TOKENIZE)
    _refuse_template(request, args)


def _refuse_template(request: ChatRequest | TokenizeRequest, args: ServerArgs) -> None:
    if request.chat_template and not args.trust_request_chat_template:
        raise bad_request(
            "a chat_template of the request's own needs --trust-request-chat-template",
            "chat_template",
        )


def _refuse(request: Any, table: dict[str, _Harmless]) -> None:
    for name, harmless in table.items():
        value = getattr(request, name)
        if value is not None and not harmless(value):
            raise bad_request(f"{name} is not supported with this value", name)
