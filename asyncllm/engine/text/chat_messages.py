"""Normalises OpenAI chat messages for a chat template.

Templates expect plain data: content as a string (some templates: as a list of parts), tool
arguments as an object. Parts that a text model cannot take are refused. The input is not changed.
"""

from __future__ import annotations

import json
from typing import Any

from asyncllm.errors import InvalidRequestError

ChatMessage = dict[str, Any]

PARAM = "messages"
MAX_MESSAGES = 2048  # templates run on the event loop: 10 us per message or more
MAX_PARTS = 16_384  # in all messages
ROLES_WITH_CONTENT = {"user", "system", "developer"}
MAX_TOOL_CALLS = 2048  # in all messages, as each is answered by a message
# Type of a text part -> key of its text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalize_messages(messages: list[ChatMessage], as_parts: bool = False) -> list[ChatMessage]:
    """Copies with parsed tool arguments and content as a string, or as a list of text parts.

    Raises `InvalidRequestError`.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message", PARAM)
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"{len(messages)} messages, at most {MAX_MESSAGES}", PARAM)
    _check_number("content", MAX_PARTS, messages)
    _check_number("tool_calls", MAX_TOOL_CALLS, messages)
    return [_normalize(message, index, as_parts) for index, message in enumerate(messages)]


def _check_number(key: str, limit: int, messages: list[ChatMessage]) -> None:
    lists = [m[key] for m in messages if isinstance(m, dict) and isinstance(m.get(key), list)]
    number = sum(map(len, lists))
    if number > limit:
        what = f"the lists of {key} have {number} items together, at most {limit}"
        raise InvalidRequestError(f"messages: {what}", PARAM)


def _normalize(message: ChatMessage, index: int, as_parts: bool) -> ChatMessage:
    if not isinstance(message, dict):
        raise _error(index, f"must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _error(index, "role must be a non-empty string")
    # Many templates print None or fail on it, but accept a missing key.
    result = {key: value for key, value in message.items() if value is not None}
    texts = _texts(message.get("content"), index)
    if role in ROLES_WITH_CONTENT and message.get("content") is None:
        raise _error(index, f"of role {role} must have content")
    if as_parts:
        result["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        result["content"] = "\n".join(texts)  # as vLLM does
    tool_calls = result.pop("tool_calls", None)
    function_call = result.pop("function_call", None)  # the deprecated form
    if tool_calls is None and function_call is not None:
        tool_calls = [{"type": "function", "function": function_call}]
    if tool_calls:
        result["tool_calls"] = _parse_tool_calls(tool_calls, index)
    if role == "function":
        result["role"] = "tool"
    # Clients and templates use either name.
    reasoning = result.get("reasoning") or result.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    return result


def _texts(content: object, index: int) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _error(index, f"content must be a string or a list, got {type(content).__name__}")
    return [_part_text(part, index) for part in content]


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _error(index, f"content parts must be objects, got {type(part).__name__}")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise _error(index, "has a content part whose type is not a string")
    key = TEXT_PARTS.get(kind)
    if key is None:
        raise _error(index, f"has a part of type {kind[:100]!r}, but this model takes text only")
    text = part.get(key)
    if not isinstance(text, str):
        raise _error(index, f"has a {kind} part whose {key!r} is not a string")
    return text


def _parse_tool_calls(calls: object, index: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _error(index, f"tool_calls must be a list, got {type(calls).__name__}")
    return [_parse_tool_call(call, index) for call in calls]


def _parse_tool_call(call: object, index: int) -> dict[str, Any]:
    """The call with its arguments as an object; OpenAI's clients send a JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _error(index, "each of tool_calls must be an object with a 'function'")
    if not isinstance(function.get("name"), str):
        raise _error(index, "each of tool_calls must name its function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _error(index, f"has tool_calls arguments that are no JSON: {error}") from None
    if not isinstance(arguments, dict | list):
        raise _error(index, "has tool_calls arguments that are no JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _error(index: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages[{index}] {what}", PARAM)
