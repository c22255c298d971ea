"""Parses the tools and the tool choice of a request, in the form of OpenAI's chat API.

Other APIs are converted to this form. Errors name the field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncllm.errors import InvalidRequestError

MAX_TOOLS = 128  # OpenAI's
MAX_SCHEMA_BYTES = 128 * 1024  # of the parameters of all tools

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: the JSON schema of an object. strict: arguments must satisfy it. param: the
    field with the parameters in the request.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    param: str = "tools"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """tools: those that may be called. required: at least one must be called. only_these: calls of
    other names are text.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    only_these: bool = False


def parse_tools(raw: object) -> tuple[Tool, ...]:
    """Parse `tools` of a chat request. Raises `InvalidRequestError`."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise InvalidRequestError("tools must be a list", "tools")
    if len(raw) > MAX_TOOLS:
        raise InvalidRequestError(f"{len(raw)} tools, at most {MAX_TOOLS}", "tools")
    tools = tuple(_parse_tool(tool, f"tools[{i}]") for i, tool in enumerate(raw))
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            where = f"tools[{i}].function.name"
            raise InvalidRequestError(f"{where}: {tool.name!r} is there twice", where)
        seen.add(tool.name)
    size = len(msgspec.json.encode([tool.parameters for tool in tools]))
    if size > MAX_SCHEMA_BYTES:
        message = f"the tools' parameters have {size} bytes, at most {MAX_SCHEMA_BYTES}"
        raise InvalidRequestError(message, "tools")
    return tools


def parse_tool_choice(raw: object, tools: Sequence[Tool]) -> ToolChoice:
    """Parse `tool_choice` of a chat request. Raises `InvalidRequestError`."""
    if raw is None:
        raw = "auto" if tools else "none"
    if raw == "none":
        return ToolChoice()
    if not tools:
        raise InvalidRequestError("tool_choice needs tools", "tool_choice")
    if isinstance(raw, str):
        if raw not in _MODES:
            raise _choice_error(f"must be one of {', '.join(_MODES)} or an object")
        return ToolChoice(tuple(tools), raw == "required")
    if not isinstance(raw, dict):
        raise _choice_error("must be a string or an object")
    if raw.get("type") == "allowed_tools":
        return _allowed(raw.get("allowed_tools"), tools)
    return ToolChoice((_named(raw, tools, "tool_choice"),), required=True)


def _parse_tool(raw: object, where: str) -> Tool:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} must be an object", where)
    if raw.get("type") != "function":
        kind = raw.get("type")
        shown = f"{kind!r:.100} is not supported: only 'function' is"
        raise InvalidRequestError(f"{where}.type {shown}", f"{where}.type")
    function = raw.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where} must be an object", where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{where}.name must be 1 to 64 letters, digits, '_', '-' and '.'"
        raise InvalidRequestError(message, f"{where}.name")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{where}.strict must be true or false", f"{where}.strict")
    parameters = _parse_parameters(function.get("parameters"), where)
    return Tool(name, parameters, bool(strict), f"{where}.parameters")


def _parse_parameters(raw: object, where: str) -> dict[str, Any]:
    """The parameters' schema; without one, the function takes none."""
    where = f"{where}.parameters"
    if raw is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} must be a JSON schema, an object", where)
    if raw.get("type", "object") != "object":
        raise InvalidRequestError(f"{where} must be the schema of an object", where)
    if not isinstance(raw.get("properties", {}), dict):
        raise InvalidRequestError(f"{where}.properties must be an object", where)
    return {"type": "object", **raw}


def _allowed(raw: object, tools: Sequence[Tool]) -> ToolChoice:
    where = "tool_choice.allowed_tools"
    if not isinstance(raw, dict) or not isinstance(raw.get("tools"), list) or not raw["tools"]:
        raise InvalidRequestError(f"{where} must have a list of tools", where)
    mode = "auto" if raw.get("mode") is None else raw["mode"]
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"{where}.mode must be auto or required", f"{where}.mode")
    if len(raw["tools"]) > MAX_TOOLS:
        raise InvalidRequestError(f"{where}.tools: at most {MAX_TOOLS}", f"{where}.tools")
    named = [_named(one, tools, f"{where}.tools[{i}]") for i, one in enumerate(raw["tools"])]
    names = {tool.name for tool in named}
    allowed = tuple(tool for tool in tools if tool.name in names)
    return ToolChoice(allowed, mode == "required", only_these=True)


def _named(raw: object, tools: Sequence[Tool], where: str) -> Tool:
    """The tool that {"type": "function", "function": {"name": ...}} names."""
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or raw.get("type") != "function" or not isinstance(function, dict):
        message = f'{where} must be {{"type": "function", "function": {{"name": ...}}}}'
        raise InvalidRequestError(message, where)
    name = function.get("name")
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequestError(f"{where} names {name!r:.100}, which is none of the tools", where)


def _choice_error(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"tool_choice {what}", "tool_choice")
