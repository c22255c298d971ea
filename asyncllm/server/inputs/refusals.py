"""Fields that would change the response and are not served: refused by name, never ignored.

Tables, so that a feature that arrives deletes its line. APIs that become a chat request name the
client's own field in errors: `rename_params`, `renamed`.
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

# field -> whether a value changes nothing (None never does)
Refusals = Mapping[str, Callable[[Any], bool]]

_ROOT = re.compile(r"\w+")


def is_empty(value: Any) -> bool:
    """For a field where only an empty value changes nothing."""
    return not value


def sent_fields(request: msgspec.Struct) -> dict[str, Any]:
    """The fields that the client sent, without nulls: a few of many."""
    values = zip(request.__struct_fields__, msgspec.structs.astuple(request), strict=True)
    return {name: value for name, value in values if value is not None}


def refuse(given: Mapping[str, Any], table: Refusals) -> None:
    """Raises `ApiError` 400 for the first field that is not supported.

    given: the `sent_fields`.
    """
    for name, value in given.items():
        if (harmless := table.get(name)) is not None and not harmless(value):
            raise bad_request(f"{name} is not supported with this value", name)


def renamed(error: InvalidRequestError, name: str | None) -> InvalidRequestError:
    """The error with `name` for its field, in its message too.

    A copy: requests that wait for the same grammar are all raised one error.
    """
    named = copy(error)
    if error.param is not None and name is not None:
        named.args = (str(error).replace(error.param, name),)
    named.param = name
    return named


@contextmanager
def rename_params(names: Mapping[str, str]) -> Iterator[None]:
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
    "logits_processors": is_empty,
    "watermarking": is_empty,
    "kv_transfer_params": is_empty,
    "ec_transfer_params": is_empty,
    "vllm_xargs": is_empty,
}
_CHAT: Refusals = {
    **_COMMON,
    "audio": is_empty,
    "modalities": lambda value: value == ["text"],
    "moderation": is_empty,
    "verbosity": lambda value: value == "medium",
    "web_search_options": lambda value: False,
    "mm_processor_kwargs": is_empty,
    "media_io_kwargs": is_empty,
}
_COMPLETION: Refusals = {
    **_COMMON,
    "suffix": is_empty,
    "prompt_embeds": is_empty,
}
_TOKENIZE: Refusals = {
    "mm_processor_kwargs": is_empty,
    "media_io_kwargs": is_empty,
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
    """Raises `ApiError` 400 for the first field that is not supported.

    given: the request's `sent_fields`.
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
    refuse(sent_fields(request), _TOKENIZE)
    _refuse_template(request, args)


def _refuse_template(request: ChatRequest | TokenizeRequest, args: ServerArgs) -> None:
    if request.chat_template and not args.trust_request_chat_template:
        raise bad_request(
            "a chat_template of the request's own needs --trust-request-chat-template",
            "chat_template",
        )
