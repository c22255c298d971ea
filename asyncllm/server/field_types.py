"""Shapes of what requests hold in fields typed `Any` or `dict`, for openapi.json alone.

Such fields are checked by who reads them (the chat template's messages, the tools' schemas), so
these types say what is meant, and are never decoded into.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from asyncllm.server.answers import ToolCall


class TextPart(Struct):
    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(Struct):
    """One turn. Templates may take further keys."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Struct):
    """`parameters` is a JSON Schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Struct):
    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolChoice(Struct, tag_field="type", tag="allowed_tools"):
    """Only these may be called."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice
FunctionChoice = Literal["none", "auto"] | NamedFunction
