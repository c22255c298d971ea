"""`FieldDoc`: the text, range and effect of one request field; and shapes of fields typed `Any`.

Fields typed `Any` or `dict` are checked by the code that reads them (the chat template's messages,
the tools' schemas); the types below document them, and are never decoded into.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from msgspec import Struct

from asyncllm.server.openapi.response_types import ToolCall

Kind = Literal["done", "ignored", "refused"]
_KIND_WORDS = {
    "done": "",
    "ignored": "Accepted and ignored: it does not change the answer.",
    "refused": "Refused where it asks for anything.",
}


@dataclasses.dataclass(frozen=True, slots=True)
class FieldDoc:
    """`schema`: JSON Schema keywords beside the type's; `type`: what a field typed `Any` takes."""

    text: str
    kind: Kind = "done"
    schema: dict[str, Any] = dataclasses.field(default_factory=dict)
    type: Any = None

    @property
    def description(self) -> str:
        return f"{_KIND_WORDS[self.kind]} {self.text}".strip()


def between(low: float | None, high: float | None, text: str, **more: Any) -> FieldDoc:
    limits = {"minimum": low, "maximum": high}
    return FieldDoc(text, schema={k: v for k, v in limits.items() if v is not None} | more)


def ignored(text: str = "") -> FieldDoc:
    return FieldDoc(text, "ignored")


def refused(text: str = "") -> FieldDoc:
    return FieldDoc(text, "refused")


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
