"""Input items: read strictly, kept in one canonical form, and put into a conversation.

A kept item has only the keys that are written here, and content as a list of text parts, so what
comes back from the store needs no second check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.http.errors import ApiError, bad_request

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]

MAX_ITEMS = 2048  # of one request; the chat template has the same limit of messages

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def read_items(given: str | list[Item], unique: str, find: FindItem) -> list[Item]:
    """`unique` goes into the ids of items that have none; `find` resolves item references.

    Raises `ApiError` naming the item.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise bad_request("input must not be empty", "input")
    if len(given) > MAX_ITEMS:
        raise bad_request(f"input has {len(given)} items, at most {MAX_ITEMS}", "input")
    return [_read(item, unique, index, find) for index, item in enumerate(given)]


def add_items(conversation: Conversation, items: Iterable[Item]) -> None:
    for item in items:
        match item["type"]:
            case "message":
                _add_message(conversation, item)
            case "function_call":
                conversation.add_tool_call(item["call_id"], item["name"], item["arguments"])
            case "function_call_output":
                conversation.add_tool_result(item["call_id"], item["output"])
            case "reasoning":
                parts = item.get("content") or item["summary"]
                conversation.add_reasoning("\n".join(part["text"] for part in parts))


def _add_message(conversation: Conversation, item: Item) -> None:
    texts = [{"type": "text", "text": part["text"]} for part in item["content"]]
    match item["role"]:
        case "assistant":
            conversation.add_text(texts)
        case "user":
            conversation.add_user(texts)
        case _:
            conversation.add_system(texts)


def _read(item: Item, unique: str, index: int, find: FindItem) -> Item:
    where = f"input[{index}]"
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "item_reference":
        return _referenced(item, where, find)
    prefix = _ID_PREFIXES.get(kind) if isinstance(kind, str) else None
    if prefix is None:
        raise bad_request(f"{where}: items of type {str(kind)[:100]!r} are not supported", "input")
    own = item.get("id")
    head = {"id": own if isinstance(own, str) else f"{prefix}_{unique}_in{index}", "type": kind}
    fields: Item
    match kind:
        case "message":
            return {**head, **_message(item, where)}
        case "function_call":
            fields = {key: _string(item, key, where) for key in ("call_id", "name", "arguments")}
        case "function_call_output":
            output = item.get("output")
            texts = output if isinstance(output, str) else _parts(output, where, "input_text")
            fields = {"call_id": _string(item, "call_id", where), "output": texts}
        case _:
            return {**head, **_reasoning(item, where)}
    return {**head, **fields, "status": "completed"}


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise _error(where, "role must be user, assistant, system or developer")
    kind = "output_text" if role == "assistant" else "input_text"
    content = item.get("content")
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else (
        _parts(content, where, kind)
    )  # fmt: skip
    return {"role": role, "content": parts, "status": "completed"}


def _reasoning(item: Item, where: str) -> Item:
    return {
        "summary": _parts(item.get("summary") or [], where, "summary_text"),
        "content": _parts(item.get("content") or [], where, "reasoning_text"),
    }


def _referenced(item: Item, where: str, find: FindItem) -> Item:
    name = _string(item, "id", where)
    found = find(name)
    if found is None:
        raise ApiError(404, f"{where}: there is no item {name[:100]!r}", "input", "not_found")
    return found


def _parts(content: Any, where: str, kind: str) -> list[Item]:
    """Its text parts as parts of one kind."""
    if not isinstance(content, list):
        raise _error(where, "content must be a string or a list of parts")
    return [_part(part, where, kind) for part in content]


def _part(part: Any, where: str, kind: str) -> Item:
    given = part.get("type") if isinstance(part, dict) else None
    key = "text" if given == kind else _TEXT_PARTS.get(given) if isinstance(given, str) else None
    if key is None:
        raise _error(where, f"this model takes text only, not parts of type {str(given)[:100]!r}")
    shown = {"type": kind, "text": _string(part, key, where)}
    return {**shown, "annotations": []} if kind == "output_text" else shown


def _string(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _error(where, f"{key} must be a string")
    return value


def _error(where: str, what: str) -> ApiError:
    return bad_request(f"{where}: {what}", "input")
