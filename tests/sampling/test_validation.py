"""Whatever is wrong with a field, the error names the field: in Python and over HTTP alike."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from asyncllm import EngineArgs, InvalidRequestError, SamplingParams
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.engine.logprobs import MAX_OUTPUT_LOGPROB_ENTRIES, MAX_PROMPT_LOGPROB_ENTRIES
from asyncllm.engine.text.prompt_encoder import PromptEncoder
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.sampling_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from asyncllm.types import Request
from tests.text import tokenizer_folders as folders

VOCAB = folders.MODEL_CONFIG["vocab_size"]
HUGE = 2**64
NOT_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, "1", True, [1], {}, None]
NOT_INTS: list[Any] = [1.0, 0.5, math.nan, "1", True, [1], {}, HUGE, -HUGE, 10**5000]
NOT_ID_LISTS: list[Any] = ["1", 1, {1: 1}, [1.0], ["1"], [None], [True], [-1], [HUGE], (1, 2)]
NOT_WORD_LISTS: list[Any] = [1, {}, [1], [None], [""], [["a"]], ("a",)]

# field -> (values that are good, just inside its limits; values that are not)
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, MAX_N], [*NOT_INTS, 0, -1, MAX_N + 1, None]),
    "best_of": ([None, 1, MAX_N], [*NOT_INTS, 0, -1, MAX_N + 1]),
    "temperature": ([0, 0.7, 100], [*NOT_NUMBERS, -0.1, 100.1]),
    "top_p": ([1e-9, 1], [*NOT_NUMBERS, 0, -0.1, 1.0001]),
    "top_k": ([-1, 0, 1, MAX_SEED], [*NOT_INTS, -2, None]),
    "min_p": ([0, 1], [*NOT_NUMBERS, -0.1, 1.1]),
    "presence_penalty": ([-2, 2], [*NOT_NUMBERS, -2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [*NOT_NUMBERS, -2.1, 2.1]),
    "repetition_penalty": ([0.01, 10], [*NOT_NUMBERS, 0, -1, 0.009, 10.1]),
    "seed": ([None, -1, 0, MAX_SEED, -MAX_SEED - 1], [*NOT_INTS, MAX_SEED + 1]),
    "max_tokens": ([None, 1, MAX_SEED], [*NOT_INTS, 0, -1]),
    "min_tokens": ([0, 16], [*NOT_INTS, -1, 17, None]),
    "logprobs": ([None, 0, 5, -1], [*NOT_INTS, -2]),
    "prompt_logprobs": ([None, 0, 5, -1], [*NOT_INTS, -2]),
    "truncate_prompt_tokens": ([None, -1, 1], [*NOT_INTS, 0, -2]),
    "truncation_side": (["left", "right"], ["", "both", None, 1]),
    "thinking_token_budget": ([None, -1, 0, MAX_SEED], [*NOT_INTS, -2]),
    "stop": (
        [None, "x", [], ["x" * MAX_STOP_STRING_CHARS] * MAX_STOP_STRINGS],
        [*NOT_WORD_LISTS, "", ["x" * (MAX_STOP_STRING_CHARS + 1)], ["x"] * (MAX_STOP_STRINGS + 1)],
    ),
    "bad_words": (
        [None, [], ["x" * MAX_BAD_WORD_CHARS] * MAX_BAD_WORDS],
        [*NOT_WORD_LISTS, "x", ["x" * (MAX_BAD_WORD_CHARS + 1)], ["x"] * (MAX_BAD_WORDS + 1)],
    ),
    "stop_token_ids": (
        [None, [], [0] * MAX_STOP_TOKEN_IDS],
        [*NOT_ID_LISTS, [0] * (MAX_STOP_TOKEN_IDS + 1)],
    ),
    "allowed_token_ids": (
        [None, [5], [0] * MAX_ALLOWED_TOKEN_IDS],
        [*NOT_ID_LISTS, [], [0] * (MAX_ALLOWED_TOKEN_IDS + 1)],
    ),
    "logprob_token_ids": (
        [None, [5, 5], [0] * MAX_LOGPROB_TOKEN_IDS],
        [*NOT_ID_LISTS, [], [0] * (MAX_LOGPROB_TOKEN_IDS + 1)],
    ),
    "logit_bias": (
        [None, {}, {"1": 1, 2: -100.0}, {str(i): 100 for i in range(MAX_LOGIT_BIAS_ENTRIES)}],
        [
            [1], "x", 5, {"x": 1}, {"": 1}, {"-1": 1}, {"+1": 1}, {" 1": 1}, {"1_0": 1},
            {"1.0": 1}, {"\u0661": 1}, {"²": 1}, {"9" * 5000: 1}, {-1: 1}, {1.0: 1}, {True: 1},
            {None: 1}, {"1": 1, 1: 2}, {"1": math.nan}, {"1": math.inf}, {"1": "1"},
            {"1": None}, {"1": True}, {"1": 100.1}, {"1": -100.1},
            {str(i): 1 for i in range(MAX_LOGIT_BIAS_ENTRIES + 1)},
        ],
    ),
    "ignore_eos": ([True, False], [0, 1, "true", None]),
    "detokenize": ([True, False], [0, 1, "true", None]),
    "skip_special_tokens": ([True, False], [0, 1, "true", None]),
    "spaces_between_special_tokens": ([True, False], [0, 1, "true", None]),
    "include_stop_str_in_output": ([True, False], [0, 1, "true", None]),
}  # fmt: skip
BAD = [(name, value) for name, (_, bad) in FIELDS.items() for value in bad]


def short(value: Any) -> str:
    return value if isinstance(value, str) and value in FIELDS else ""


@pytest.mark.parametrize(("name", "value"), BAD, ids=short)
def test_a_bad_value_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", FIELDS)
def test_the_limits_themselves_are_good(name: str) -> None:
    for value in FIELDS[name][0]:
        SamplingParams(**{name: value})


def test_every_field_is_here_or_has_its_own_tests() -> None:
    elsewhere = {
        "output_kind", "extra_args",
        "repetition_detection",  # test_repetition.py
        "structured_outputs", "logits_processors",
        "use_beam_search", "length_penalty", "early_stopping",
    }  # fmt: skip
    assert set(SamplingParams.__dataclass_fields__) <= FIELDS.keys() | elsewhere


def test_what_is_no_seed_and_no_budget() -> None:
    params = SamplingParams(seed=-1, thinking_token_budget=-1)
    assert params.seed is None and params.thinking_token_budget is None


def test_keys_of_logit_bias_become_ids() -> None:
    assert SamplingParams(logit_bias={"007": 1, 8: 2}).logit_bias == {7: 1.0, 8: 2.0}  # type: ignore[dict-item]


# --- what depends on the model --------------------------------------------------------------------


@pytest.fixture
def processor(model_folder: Path, byte_level: Tokenizer) -> InputProcessor:
    """Its window is larger than all limits that are tested here."""
    config = EngineArgs(model=str(model_folder), device="cpu").create_engine_config()
    return InputProcessor(config, byte_level, 2 * MAX_OUTPUT_LOGPROB_ENTRIES)


def process(processor: InputProcessor, ids: list[int], **fields: Any) -> Request:
    return asyncio.run(processor.process("r", ids, SamplingParams(**fields), 0.0))


def refused(processor: InputProcessor, ids: list[int], **fields: Any) -> str | None:
    with pytest.raises(InvalidRequestError) as caught:
        process(processor, ids, **fields)
    return caught.value.param


@pytest.mark.parametrize("name", ["logprob_token_ids", "allowed_token_ids", "stop_token_ids"])
def test_token_ids_must_be_in_the_vocabulary(processor: InputProcessor, name: str) -> None:
    last = VOCAB - 1
    process(processor, [1], **{name: [0, last]})
    assert refused(processor, [1], **{name: [0, last + 1]}) == name


def test_the_entries_of_prompt_logprobs_are_bounded(processor: InputProcessor) -> None:
    half = MAX_PROMPT_LOGPROB_ENTRIES // 2
    for most, num_top in ((half, 1), (MAX_PROMPT_LOGPROB_ENTRIES // 21, 20)):
        process(processor, [1] * most, prompt_logprobs=num_top)
        assert refused(processor, [1] * (most + 1), prompt_logprobs=num_top) == "prompt_logprobs"


@pytest.mark.parametrize(
    ("fields", "entries_per_token", "param"),
    [
        ({"logprobs": 0}, 1, "logprobs"),
        ({"logprobs": 20}, 21, "logprobs"),
        ({"logprobs": 3, "n": 5}, 20, "logprobs"),
        ({"logprobs": 3, "n": 2, "best_of": 5}, 20, "logprobs"),
        ({"logprob_token_ids": [1, 2]}, 3, "logprob_token_ids"),
        ({"best_of": 128}, 128, "best_of"),
        ({"n": 4, "use_beam_search": True}, 4, "n"),
        ({"n": 4, "use_beam_search": True, "logprobs": 1}, 8, "logprobs"),
    ],
)
def test_the_entries_of_logprobs_are_bounded(
    processor: InputProcessor, fields: dict[str, Any], entries_per_token: int, param: str
) -> None:
    """Named if asked for; else an answer is no longer than they have room for."""
    most = MAX_OUTPUT_LOGPROB_ENTRIES // entries_per_token

    def max_tokens(asked: int | None) -> int:
        return process(processor, [1], **fields, max_tokens=asked).max_tokens

    assert max_tokens(most) == max_tokens(None) == most
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_OUTPUT_LOGPROB_ENTRIES}") as found:
        max_tokens(most + 1)
    assert found.value.param == param
    assert str((most + 1) * entries_per_token) in str(found.value)


def test_answers_without_logprobs_have_the_whole_window(processor: InputProcessor) -> None:
    request = process(processor, [1], n=128, max_tokens=None)
    assert request.max_tokens == processor.max_model_len - 1


def test_a_bad_word_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PromptEncoder(None, vocab_size=9, max_model_len=9)
    monkeypatch.setattr(encoder, "encode", lambda text, special, param: [])
    with pytest.raises(InvalidRequestError) as caught:
        encoder.bad_words_ids(["x"])
    assert caught.value.param == "bad_words"
