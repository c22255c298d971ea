"""Fields that change the answer and do nothing here yet: refused by name, never ignored.

A table, so that a feature that arrives deletes its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest

_Harmless = Callable[[Any], bool]


def _empty(value: Any) -> bool:
    return not value


def _only_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


# field -> the values that ask for nothing (None always does)
_COMMON: dict[str, _Harmless] = {
    "response_format": _only_text,
    "structured_outputs": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "logits_processors": _empty,
    "kv_transfer_params": _empty,
    "vllm_xargs": _empty,
}
_CHAT: dict[str, _Harmless] = {
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": _empty,
    "function_call": lambda value: value in ("none", "auto"),
    "audio": _empty,
    "modalities": lambda value: value == ["text"],
    "moderation": _empty,
    "verbosity": lambda value: value == "medium",
    "web_search_options": lambda value: False,
    "chat_template": _empty,
    "mm_processor_kwargs": _empty,
    "echo": _empty,
    "include_reasoning": lambda value: value is True,
}
_COMPLETION: dict[str, _Harmless] = {
    "suffix": _empty,
    "prompt_embeds": _empty,
}
_TOKENIZE: dict[str, _Harmless] = {
    "chat_template": _empty,
    "mm_processor_kwargs": _empty,
    "media_io_kwargs": _empty,
}


def refuse_unsupported(request: ChatRequest | CompletionRequest) -> None:
    """Raises `ApiError` 400 for the first field that asks for what is not there."""
    _refuse(request, _COMMON)
    if isinstance(request, ChatRequest):
        _refuse(request, _CHAT)
        # With tool_choice "none" tools only go into the prompt; otherwise calls must be parsed.
        if request.tools and request.tool_choice != "none":
            raise bad_request("tools are supported only with tool_choice 'none'", "tools")
    else:
        _refuse(request, _COMPLETION)


def refuse_unsupported_tokenize(request: TokenizeRequest) -> None:
    _refuse(request, _TOKENIZE)


def _refuse(request: Any, table: dict[str, _Harmless]) -> None:
    for name, harmless in table.items():
        value = getattr(request, name)
        if value is not None and not harmless(value):
            raise bad_request(f"{name} is not supported with this value", name)
