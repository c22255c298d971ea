"""Which format a model's chat template and the two flags mean."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncllm
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.formats import resolve
from asyncllm.formats.families import REASONING_PARSERS, TOOL_PARSERS
from tests.formats.answers import read_in_all_cuts
from tests.formats.test_families import CALLS, model_format

TINY = Path(asyncllm.__file__).parent / "assets" / "tiny"
QWEN3 = (
    '{%- if tools %}{{- "<tools>" }}...a json object with function name and arguments within '
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>...'
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
)


def test_the_built_in_model() -> None:
    tokenizer = Tokenizer.from_folder(TINY)
    found = resolve(tokenizer.chat_template, tokenizer.special_tokens)
    assert found is not None
    assert found.format.calls == TOOL_PARSERS["hermes"].calls
    assert found.reasoning == REASONING_PARSERS["qwen3"].reasoning
    assert not found.keeps_special_tokens


def test_qwen3() -> None:
    found = resolve(QWEN3, {"<|im_end|>": 5})
    assert found is not None and found.reasoning is not None
    assert found.format.calls == TOOL_PARSERS["hermes"].calls
    assert found.reads_calls and not found.keeps_special_tokens


@pytest.mark.parametrize("name", CALLS)
def test_a_template_that_shows_a_call_is_known(name: str) -> None:
    """By the calls in it; bare calls show nothing."""
    found = resolve(CALLS[name][0][0])
    unmarked = {"llama3_json", "pythonic", "llama4_pythonic", "xlam", "granite-20b-fc"}
    if name in unmarked:
        assert found is None
    else:
        same = {"hunyuan_a13b": "jamba"}.get(name, name)
        assert found is not None and found.format.calls == TOOL_PARSERS[same].calls


def test_names_go_before_the_template() -> None:
    found = resolve(QWEN3, tool_parser="glm45", reasoning_parser="none")
    assert found is not None
    assert found.format.calls == TOOL_PARSERS["glm45"].calls and found.reasoning is None


def test_nothing_known() -> None:
    assert resolve("{{ messages }}") is None
    assert resolve(None) is None
    assert resolve(QWEN3, tool_parser="none", reasoning_parser="none") is None


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="tool-call parser 'gpt' is not known: one of auto, none"):
        resolve(None, tool_parser="gpt")
    with pytest.raises(ValueError, match="reasoning parser"):
        resolve(None, reasoning_parser="gpt")


def test_special_tokens_stay_where_markers_are_special_tokens() -> None:
    template, special = CALLS["kimi_k2"][0][0], {"<|tool_call_begin|>": 7, "<|im_end|>": 5}
    found = resolve(template, special)
    assert found is not None and found.keeps_special_tokens
    answer = read_in_all_cuts(found, "One <|im_end|>moment.<|im_end|>" + template + "<|im_end|>")
    assert answer.content == "One moment." and len(answer.calls) == 2


def test_a_continued_message() -> None:
    found = model_format("hermes", "qwen3")
    assert found.is_reasoning_open("...<think>\nSo", prefix="<think>\nSo")
    assert not found.is_reasoning_open("...</think>\nYes", prefix="<think>So</think>\nYes")
    assert not found.is_reasoning_open("user\nwhat is <think>?\nassistant\n")
