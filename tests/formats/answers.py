"""An answer's text, read whole and in pieces, as one comparable record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncllm.formats import ModelFormat
from asyncllm.formats.events import (
    AnswerParser,
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from asyncllm.formats.tools import Tool


def tool(name: str, **properties: str | dict[str, Any]) -> Tool:
    """`properties`: a type's name, or a schema."""
    schemas = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
    return Tool(name, {"type": "object", "properties": schemas})


WEATHER = tool("get_weather", city="string", unit="string")
MANY = tool(
    "many-types.v2",
    text="string",
    count="integer",
    ratio="number",
    on="boolean",
    nothing="null",
    items="array",
    more="object",
    either={"anyOf": [{"type": "integer"}, {"type": "string"}]},
    anything={},
)
CLOCK = tool("clock")
TOOLS = (WEATHER, MANY, CLOCK)


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments' text
    ids: list[str] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    assert text, "an empty event"
                    self.content += text
                case Reasoning(text):
                    assert text, "an empty event"
                    self.reasoning += text
                case ToolCallBegin(index, call_id, name):
                    assert index == len(self.calls)
                    self.calls.append([name, ""])
                    self.ids.append(call_id)
                case ToolCallArguments(index, text):
                    assert text and index == len(self.calls) - 1
                    self.calls[index][1] += text

    @property
    def parsed_calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]

    def told(self) -> tuple[str, str, list[list[str]]]:
        """All but the ids, which are made up."""
        return self.content, self.reasoning, self.calls


def read(new_parser: Callable[[], AnswerParser], pieces: Iterable[str]) -> Answer:
    parser, answer = new_parser(), Answer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.close())
    return answer


def cuts(text: str) -> Iterator[list[str]]:
    """`text` as one, cut at every place, and as single characters."""
    yield [text]
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]
    yield list(text)


def read_in_all_cuts(
    model_format: ModelFormat, text: str, prompt: str = "", tools: tuple[Tool, ...] = TOOLS
) -> Answer:
    """The answer, which is the same however it is cut."""
    answers = [read(lambda: model_format.parser(tools, prompt), pieces) for pieces in cuts(text)]
    for answer in answers:
        assert answer.told() == answers[0].told()
    return answers[0]
