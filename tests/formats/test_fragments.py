"""Any heap of a family's markers and names is read without error, and the same however cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.formats import ModelFormat
from asyncllm.formats.families import TOOL_PARSERS
from tests.formats.answers import TOOLS, read
from tests.formats.test_families import CALLS, model_format

COMMON = [
    "get_weather", "clock", "nobody", "city", "functions.clock:0", '"name"', '"arguments"', ":",
    '"clock"', "{", "}", "{}", "[", "]", "(", ")", ",", "=", '"', "'", "\\", "\\u00e9", "5", "null",
    " ", "\n", "text", "<", "ü🦊", "<think>", "</think>",
    "<|im_end|>",
]  # fmt: skip


def fragments(name: str) -> list[str]:
    found = {marker.strip() for marker in TOOL_PARSERS[name].markers} - {""}
    samples = [text for text, _ in CALLS[name]]
    return sorted(found) * 2 + COMMON + samples


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_fragments(name: str, data: st.DataObject) -> None:
    heap = data.draw(st.lists(st.sampled_from(fragments(name)), max_size=25))
    text = "".join(heap)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    ends = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(ends)]
    reasoning = "openai_gptoss" if name == "openai" else "qwen3"
    found = with_noise(model_format(name, reasoning))
    whole = read(lambda: found.parser(TOOLS), [text])
    assert read(lambda: found.parser(TOOLS), pieces).told() == whole.told()
    assert read(lambda: found.parser(TOOLS), list(text)).told() == whole.told()
    strict = read(lambda: found.parser(TOOLS, only_these=True), pieces)
    assert all(called in {tool.name for tool in TOOLS} for called, _ in strict.calls)


def with_noise(found: ModelFormat) -> ModelFormat:
    """With a special token that means nothing, as every tokenizer has them."""
    return ModelFormat(found.format, {"<|im_end|>": 1})
