"""Answers with thinking and calls: the fake engine writes Hermes' format, its tokenizer says so."""

from __future__ import annotations

from tests.server.fake_engine import FakeEngine

NAMES = ("weather", "time")
THOUGHT_AND_CALLS = (
    "<think>\nGrün?\n</think>\n\nI will ask.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


def script(engine: FakeEngine, answer: str = THOUGHT_AND_CALLS) -> None:
    """Every answer is this one, to be read as Hermes' format."""
    engine.tokenizer.chat_template = "<think></think><tool_call>"  # what detection looks for
    engine.script = answer
