"""The forms of a prompt: text, token ids, vLLM's dicts of either, or chat messages.

Here they are told apart, and their structure is checked. The input processor checks the contents.
"""

from __future__ import annotations

from typing import NamedTuple, NotRequired, Required, TypedDict

from asyncllm.engine.text.chat_messages import ChatMessage
from asyncllm.errors import InvalidRequestError


class TextPrompt(TypedDict):
    """Text to encode. `add_special_tokens=False` is for text that already has them."""

    prompt: Required[str]
    add_special_tokens: NotRequired[bool]
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """Token ids, which are used unchanged; `prompt` is their text, if any."""

    prompt_token_ids: Required[list[int]]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


PromptInput = str | list[int] | TextPrompt | TokensPrompt | list[ChatMessage]

_KNOWN_KEYS = {"prompt", "prompt_token_ids", "add_special_tokens", "cache_salt"}


class ParsedPrompt(NamedTuple):
    """Token ids, messages or text. param: the client's name for it. noun: the name in messages."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None
    param: str = "prompt"
    noun: str = "prompt"


def parse_prompt(prompt: PromptInput | ParsedPrompt) -> ParsedPrompt:
    """Find out the form of a prompt. Raises `InvalidRequestError` if it has none."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, dict):
        return _parse_dict(dict(prompt))
    if isinstance(prompt, list):
        return _parse_list(prompt)
    raise InvalidRequestError(
        "prompt must be text, a list of token ids, a dict or a list of chat messages, "
        f"got {type(prompt).__name__}",
        "prompt",
    )


def _parse_dict(prompt: dict[str, object]) -> ParsedPrompt:
    if not prompt.keys() <= _KNOWN_KEYS:
        unknown = sorted(map(str, prompt.keys() - _KNOWN_KEYS))
        raise InvalidRequestError(
            f"a prompt dict must not hold {', '.join(unknown)}: this model takes text only",
            "prompt",
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError("the 'prompt' of a dict must be a string", "prompt")
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequestError("cache_salt must be a string", "cache_salt")
    if ids is not None:
        param = "prompt_token_ids"
        return ParsedPrompt(text, _check_ids(ids, param), cache_salt=salt, param=param)
    if text is None:
        raise InvalidRequestError("a prompt dict needs 'prompt' or 'prompt_token_ids'", "prompt")
    add_special_tokens = bool(prompt.get("add_special_tokens", True))
    return ParsedPrompt(text, add_special_tokens=add_special_tokens, cache_salt=salt)


def _parse_list(prompt: list) -> ParsedPrompt:
    if prompt and isinstance(prompt[0], dict):
        return ParsedPrompt(messages=prompt, param="messages", noun="messages")
    if prompt and isinstance(prompt[0], str | list):
        raise InvalidRequestError("one request takes one prompt, got a list of them", "prompt")
    return ParsedPrompt(token_ids=_check_ids(prompt, "prompt"))


def _check_ids(ids: object, param: str) -> list[int]:
    if not isinstance(ids, list):
        raise InvalidRequestError(f"{param} must be a list of token ids", param)
    wrong = set(map(type, ids)) - {int}  # so a bool is wrong, too
    if wrong:
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise InvalidRequestError(f"token ids must be integers, got {names}", param)
    return ids
