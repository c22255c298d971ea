"""Fields that would change the response and are not served: refused by name, never ignored.

Tables, so that a feature that arrives deletes its line. APIs that become a chat request name the
client's own field in errors: `named_as`, `renamed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import msgspec

from asyncllm.errors import InvalidRequestError
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.errors import ApiError, bad_request
from asyncllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)

# field -> whether a value asks for nothing (None always does)
Refusals = Mapping[str, Callable[[Any], bool]]

_ROOT = re.compile(r"\w+")


def asks_nothing(value: Any) -> bool:
    """Of a field where only what is empty does."""
    return not value


def sent(request: msgspec.Struct) -> dict[str, Any]:
    """The fields that the client sent, but for nulls: a few of many."""
    values = zip(request.__struct_fields__, msgspec.structs.astuple(request), strict=True)
    return {name: value for name, value in values if value is not None}


def refuse(given: Mapping[str, Any], table: Refusals) -> None:
    """Raises `ApiError` 400 for the first field that asks for what is not there.

    given: what was `sent`.
    """
    for name, value in given.items():
        if (harmless := table.get(name)) is not None and not harmless(value):
            raise bad_request(f"{name} is not supported with this value", name)


def renamed(error: InvalidRequestError, name: str | None) -> InvalidRequestError:
    """The error with `name` for its field, in its message too.

    A copy: requests that wait for the same grammar are all raised one error.
    """
    told = copy(error)
    if error.param is not None and name is not None:
        told.args = (str(error).replace(error.param, name),)
    told.param = name
    return told


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of the chat request name the field that the client sent instead."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        root = _ROOT.match(error.param or "")
        if root is not None and root.group() in names:
            error.param = names[root.group()]
            if isinstance(error, InvalidRequestError) and str(error).startswith(root.group()):
                error.args = (error.param + str(error)[root.end() :],)
        raise


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
