"""Random calls, written as each family writes them and cut at random, are read back the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.formats.families import TOOL_PARSERS
from asyncllm.formats.tools import Tool
from tests.formats.answers import read
from tests.formats.test_families import CALLS, model_format
from tests.formats.written import written

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["", "\n", " x ", '"', "'", "\\", "\\n", "</tool_call>", "{}", "]", "5", "null", "True", "a\nb"]
)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "text": TEXT,
    "count": st.integers(-(2**53), 2**53),
    "ratio": NUMBERS,
    "on": st.booleans(),
    "items": st.lists(JSON, max_size=3),
    "more": st.dictionaries(TEXT, JSON, max_size=3),
}
TYPES = ("string", "integer", "number", "boolean", "array", "object")
TOOL = Tool(
    "do.it-now_2",
    {
        "type": "object",
        "properties": {key: {"type": t} for key, t in zip(KINDS, TYPES, strict=True)},
    },
)
CALL = st.tuples(st.just(TOOL.name), st.fixed_dictionaries({}, optional=KINDS))
CUTS = st.lists(st.integers(1, 12), max_size=80)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=25, deadline=None)
@given(st.lists(CALL, min_size=1, max_size=3), CUTS, st.sampled_from(["", "Yes. "]))
def test_round_trip(name: str, calls: list[Any], cuts: list[int], content: str) -> None:
    answer_format = TOOL_PARSERS[name]
    if not _can_write(name, calls) or (content and answer_format.channels):
        return
    if answer_format.calls and answer_format.calls[0].at_start:
        content = ""
    text = content + written(answer_format, calls)
    pieces, start = [], 0
    for length in cuts:
        pieces.append(text[start : start + length])
        start += length
    answer = read(lambda: model_format(name).parser([TOOL]), [*filter(None, pieces), text[start:]])
    assert answer.parsed_calls == calls
    assert answer.content == content.strip()


def _can_write(name: str, calls: list[Any]) -> bool:
    """Between tags no text, however deep in its value, can hold the end tag."""
    body = TOOL_PARSERS[name].calls[0].body if TOOL_PARSERS[name].calls else None
    quote = getattr(body, "quotes", "'")[0]
    end = getattr(body, "value_end", quote if len(quote) > 1 else "").strip()
    return not end or not any(end in repr(arguments) for _, arguments in calls)
