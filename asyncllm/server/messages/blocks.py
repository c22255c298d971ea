"""Anthropic's messages, which hold blocks, as the messages of a chat request.

A turn's text, thinking and calls become one message; each tool result becomes one of its own. A
message that ends with an assistant's text is to be gone on with (a prefill).
"""

from __future__ import annotations

import re
from typing import Any

from asyncllm.server.conversation import Conversation
from asyncllm.server.errors import bad_request
from asyncllm.server.messages.protocol import Block, CountTokensRequest, InputMessage

# Claude Code's first system block holds a number that changes with each request and is for the
# accounts of Anthropic: in front of a prompt it would keep the prefix cache from ever being used.
_BILLING = re.compile(r"x-anthropic-billing-header:")


def conversation(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Raises `ApiError` naming the message."""
    result = Conversation()
    if request.system:
        system = request.system
        parts = [{"type": "text", "text": system}] if isinstance(system, str) else system
        if texts := [part for part in parts if not _BILLING.match(_text(part, "system"))]:
            result.system(texts)
    for index, message in enumerate(request.messages):
        _add(result, message, f"messages[{index}]")
    return result.messages


def is_prefill(messages: list[dict[str, Any]]) -> bool:
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _add(result: Conversation, message: InputMessage, where: str) -> None:
    content = message.content
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if message.role == "assistant":
        for block in blocks:
            _add_to_turn(result, block, where)
    elif message.role == "system":
        result.system([{"type": "text", "text": _text(block, where)} for block in blocks])
    else:
        _add_user(result, blocks, where)


def _add_to_turn(result: Conversation, block: Block, where: str) -> None:
    match block.get("type"):
        case "text":
            result.said([{"type": "text", "text": _text(block, where)}])
        case "thinking":
            result.thought(_string(block, "thinking", where))
        case "redacted_thinking":
            pass  # none of ours: only its author can read it
        case "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise bad_request(
                    f"{where}: a tool_use block's input must be an object", "messages"
                )
            name = _string(block, "name", where)
            result.called(_string(block, "id", where), name, arguments)
        case other:
            raise _unknown(other, where)


def _add_user(result: Conversation, blocks: list[Block], where: str) -> None:
    texts: list[Block] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                result.user(texts)
                texts = []
            result.tool_result(_string(block, "tool_use_id", where), _tool_result(block, where))
        else:
            texts.append({"type": "text", "text": _text(block, where)})
    if texts:
        result.user(texts)


def _tool_result(block: Block, where: str) -> list[Block]:
    content = block.get("content") or ""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_request(
            f"{where}: a tool_result's content must be a string or a list", "messages"
        )
    texts = [{"type": "text", "text": _text(part, where)} for part in content]
    # Templates know no failed call: the model must be able to read that it was one.
    return [{"type": "text", "text": "Error:"}, *texts] if block.get("is_error") else texts


def _text(block: object, where: str) -> str:
    if not isinstance(block, dict):
        raise bad_request(f"{where}: blocks must be objects", where.partition("[")[0])
    if block.get("type") != "text":
        raise _unknown(block.get("type"), where)
    return _string(block, "text", where)


def _string(block: Block, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        message = f"{where}: a {block.get('type')} block's {key} must be a string"
        raise bad_request(message, where.partition("[")[0])
    return value


def _unknown(kind: object, where: str) -> Exception:
    message = f"{where}: blocks of type {str(kind)[:100]!r} are not supported here"
    if kind in ("image", "document"):
        message = f"{where}: this model takes text only, not blocks of type {kind!r}"
    return bad_request(message, where.partition("[")[0])
