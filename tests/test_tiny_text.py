"""The generator of the built-in model's text: right answers, one answer per prompt, nothing leaked.

Answers are checked against an independent calculation, never against the generator's own.
"""

from __future__ import annotations

import importlib
import itertools
import json
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
tiny_text: Any = importlib.import_module("tiny_text")
tiny_shards: Any = importlib.import_module("tiny_shards")
tiny_tokenizer: Any = importlib.import_module("tiny_tokenizer")

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
OPERATORS |= {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
OPERATORS |= {"divided by": operator.truediv}
SUM = re.compile(r"(-?\d+) (\+|-|\*|/|plus|minus|times|divided by) (\d+)")
JSON_TYPES = {"string": str, "integer": int, "number": int, "boolean": bool}


def examples(count: int, seed: int = 0) -> list[Any]:
    return list(itertools.islice(tiny_text.training_examples(seed), count))


def held_out(kind: str, count: int = 60) -> list[Any]:
    found: list[Any] = tiny_text.held_out_examples(kind, count)
    return found


def question(shown: Any) -> str:
    asked: str = [m["content"] for m in shown.messages if m["role"] == "user"][-1]
    return asked


def spoken(shown: Any) -> str:
    """The last answer, its thought left out."""
    return str(shown.answer).split("</think>\n\n")[-1]


def written_by_assistant(shown: Any) -> Iterator[str]:
    for message in shown.messages:
        if message["role"] == "assistant":
            yield message.get("reasoning_content", "")
            yield message["content"]


def test_same_seed_same_text() -> None:
    assert examples(300, seed=3) == examples(300, seed=3)
    assert examples(300, seed=3) != examples(300, seed=4)
    assert held_out("json") == held_out("json")


def test_every_kind_occurs() -> None:
    assert {shown.kind for shown in examples(1000)} == set(tiny_text.WEIGHTS)


@pytest.mark.slow
def test_nothing_held_out_is_trained_on() -> None:
    shown = examples(5000)
    assert not [key for one in shown for key in one.keys if tiny_text.is_held_out(key)]
    assert any(len(one.keys) > 3 for one in shown)


@pytest.mark.parametrize("kind", list(tiny_text.WEIGHTS))
def test_held_out_examples_hold_out_the_last_question(kind: str) -> None:
    shown = held_out(kind)
    keys = [one.keys[-1] for one in shown]
    assert all(map(tiny_text.is_held_out, keys))
    assert not [key for one in shown for key in one.keys[:-1] if tiny_text.is_held_out(key)]
    assert len(set(keys)) == len(keys) > 10


@pytest.mark.slow
def test_sums_stay_held_out_as_steps_of_something_longer() -> None:
    reserved = {question(one) for one in held_out("arithmetic", 2000)}
    sums = {match[0] for asked in reserved for match in SUM.finditer(asked)}
    large = {s for s in sums if max(map(int, re.findall(r"\d+", s))) > 144}
    seen = {
        m[0] for one in examples(5000) for t in written_by_assistant(one) for m in SUM.finditer(t)
    }
    assert len(large) > 500
    assert not large & seen


@pytest.mark.slow
def test_one_prompt_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for one in examples(15000):
        prompt = "".join(text for text, _ in tiny_text.segments(one))
        prompt = prompt[: prompt.rindex("<|im_start|>assistant\n")]
        prompt += str(one.thinking)
        assert answers.setdefault(prompt, one.answer) == one.answer


def test_arithmetic_is_right() -> None:
    for one in held_out("arithmetic", 500):
        match = SUM.search(question(one))
        assert match, question(one)
        a, sign, b = match.groups()
        result = re.findall(r"-?\d+", spoken(one))[-1]
        assert OPERATORS[sign](int(a), int(b)) == int(result), question(one)


def test_every_written_step_is_right() -> None:
    step = re.compile(SUM.pattern + r" = (-?\d+)")
    texts = [text for one in examples(6000) for text in written_by_assistant(one)]
    steps = [match.groups() for text in texts for match in step.finditer(text)]
    assert len(steps) > 1000
    wrong = [s for s in steps if OPERATORS[s[1]](int(s[0]), int(s[2])) != int(s[3])]
    assert not wrong


def test_units_are_right() -> None:
    seconds = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1, "weeks": 604800}
    checked = 0
    for one in held_out("units", 100):
        match = re.fullmatch(r"(\d+) (\w+) = (\d+) (\w+)", spoken(one))
        if match and match[2] in seconds and match[4] in seconds:
            assert int(match[1]) * seconds[match[2]] == int(match[3]) * seconds[match[4]]
            checked += 1
    assert checked > 5


def test_spelling_is_right() -> None:
    for one in held_out("spelling", 200):
        words = re.findall(r"[a-z]+", question(one))
        letters = spoken(one).split("-")
        backwards = re.search("backwards|everse", question(one))
        assert "".join(reversed(letters) if backwards else letters) in words


def test_counting_is_right() -> None:
    for one in held_out("counting", 200):
        if match := re.search(r"letter (\w) appear in (\w+)", question(one)):
            count = match[2].count(match[1])
            assert spoken(one).endswith("once." if count == 1 else f" {count} times.")
        elif "Count" in question(one):
            numbers = [int(n) for n in spoken(one).split(", ")]
            assert len({b - a for a, b in itertools.pairwise(numbers)}) == 1
            assert f"from {numbers[0]} to {numbers[-1]}" in question(one)


def test_json_answers_are_what_was_described() -> None:
    def values(item: Any) -> Iterator[Any]:
        if isinstance(item, dict | list):
            for value in item.values() if isinstance(item, dict) else item:
                yield from values(value)
        elif not isinstance(item, bool):
            yield item

    for one in held_out("json", 200):
        record = json.loads(spoken(one))
        assert all(str(value) in question(one) for value in values(record)), question(one)


def test_tool_calls_fit_their_signatures() -> None:
    calls = 0
    for one in held_out("tools", 300):
        functions = {tool["function"]["name"]: tool["function"] for tool in one.tools}
        assert len(functions) == len(one.tools)
        for message in one.messages:
            for call in message.get("tool_calls", ()):
                calls += 1
                function, arguments = (
                    functions[call["function"]["name"]],
                    call["function"]["arguments"],
                )
                properties = function["parameters"]["properties"]
                assert arguments.keys() <= properties.keys()
                for key, value in arguments.items():
                    assert type(value) is JSON_TYPES[properties[key]["type"]]
            if message["role"] == "tool":
                json.loads(message["content"])
    assert calls > 100


def test_tool_call_text_is_hermes() -> None:
    called = [one for one in held_out("tools", 100) if "tool_calls" in one.messages[-1]]
    for one in called:
        found = re.findall(r"<tool_call>\n(.*)\n</tool_call>", one.answer)
        wanted = [call["function"] for call in one.messages[-1]["tool_calls"]]
        assert [json.loads(text) for text in found] == wanted
    assert any(len(one.messages[-1]["tool_calls"]) == 2 for one in called)


def test_thinking_comes_when_it_is_asked_for() -> None:
    for one in examples(3000):
        system = one.messages[0]["content"] if one.messages[0]["role"] == "system" else ""
        asked = any(words in system for words in ("Think before", "Think step", "Reason first"))
        wanted = one.thinking if one.thinking is not None else asked
        assert one.answer.startswith("<think>\n") == wanted


def test_long_conversations_are_among_them() -> None:
    lengths = [sum(len(text) for text, _ in tiny_text.segments(one)) for one in examples(2000)]
    assert max(lengths) > 3500  # characters; a token has some three to four


def bare_tokenizer() -> Any:
    """A tokenizer that knows the chat template and no word."""
    blank = Tokenizer(models.BPE())
    return PreTrainedTokenizerFast(
        tokenizer_object=blank, chat_template=tiny_tokenizer.CHAT_TEMPLATE
    )


def test_chat_template_writes_what_was_trained_on() -> None:
    tokenizer = bare_tokenizer()
    for one in examples(300):
        rendered = tokenizer.apply_chat_template(
            one.messages, **tiny_tokenizer.template_arguments(one)
        )
        assert rendered == "".join(text for text, _ in tiny_text.segments(one))
        prompt = tiny_tokenizer.render_prompt(tokenizer, one)
        assert rendered == prompt + one.answer + "<|im_end|>\n"


def test_chat_template_takes_openai_forms() -> None:
    """Arguments as a JSON string, content in parts or null, thought inside the content."""
    call = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "0", "content": "1"},
    ]
    rendered = bare_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert rendered == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_rows_hold_whole_documents_once() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(4, 4096, n).astype(np.uint16) for n in rng.integers(2, 1500, 300)]
    for document in documents:
        document[0] |= tiny_shards.START
    found = []
    for rows in tiny_shards.pack(documents, pad_id=3):
        for row in rows:
            starts = [*np.flatnonzero(row & tiny_shards.START), len(row)]
            parts = [row[a:b] for a, b in itertools.pairwise(starts)]
            found += [part for part in parts if part[0] & tiny_shards.TOKEN != 3]
    assert sorted(map(bytes, found)) == sorted(map(bytes, documents))


def test_a_batch_keeps_documents_apart() -> None:
    batch_type = importlib.import_module("tiny_training").Batch
    start, trained = tiny_shards.START, tiny_shards.TRAINED
    row = [start | 5, 6, trained | 7, start | 8, trained | 9]
    batch = batch_type.unpack(torch.tensor([row], dtype=torch.int32))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.targets.tolist() == [[-100, 7, -100, 9, -100]]
    seen = [[i for i in range(5) if batch.mask[0, 0, q, i]] for q in range(5)]
    assert seen == [[0], [0, 1], [0, 1, 2], [3], [3, 4]]


@pytest.mark.parametrize("name", ["tiny", "tiny-draft"])
def test_built_in_tokenizer_matches_the_text(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "asyncllm" / "assets" / name)
    tiny_tokenizer.check_template(tokenizer, examples(100))
    text = "naïve 🦊 你好 שלום 12345\n\n  two  spaces <think>x</think>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == tiny_tokenizer.VOCAB_SIZE
