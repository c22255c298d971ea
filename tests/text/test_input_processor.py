"""Requests out of what clients send: forms of prompts, limits at the limit and one above."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import EngineArgs, EngineConfig
from asyncllm.engine.input_processor import MAX_CACHE_SALT_CHARS, InputProcessor
from asyncllm.engine.text.prompt import parse_prompt
from asyncllm.engine.text.prompt_encoder import PromptEncoder
from asyncllm.engine.text.tokenizer import LARGE_TEXT_CHARS, Tokenizer
from asyncllm.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from asyncllm.sampling_limits import MAX_SEED
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import Request, SequenceStatus
from tests.text import tokenizer_folders as folders

WINDOW = 64
VOCAB = folders.MODEL_CONFIG["vocab_size"]
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def config(model_folder: Path) -> EngineConfig:
    return EngineArgs(model=str(model_folder), device="cpu").create_engine_config()


@pytest.fixture
def processor(config: EngineConfig, byte_level: Tokenizer) -> InputProcessor:
    return InputProcessor(config, byte_level, WINDOW)


def process(processor: InputProcessor, prompt: Any, **params: Any) -> Request:
    return asyncio.run(processor.process("r", prompt, SamplingParams(**params), arrival_time=1.0))


def refused(call: Callable[[], object], param: str | None) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert caught.value.param == param
    return caught.value


# --- forms of prompts --------------------------------------------------------------------------


def test_the_forms_of_a_prompt(processor: InputProcessor, byte_level: Tokenizer) -> None:
    with_bos = byte_level.encode("The fox")
    bare = byte_level.encode("The fox", add_special_tokens=False)
    for prompt, text, ids in (
        ("The fox", "The fox", with_bos),
        ({"prompt": "The fox"}, "The fox", with_bos),
        ({"prompt": "The fox", "add_special_tokens": False}, "The fox", bare),
        ([3, 4, 5], None, [3, 4, 5]),
        ({"prompt_token_ids": [3, 4, 5]}, None, [3, 4, 5]),
        ({"prompt_token_ids": [3, 4, 5], "prompt": "shown"}, "shown", [3, 4, 5]),
    ):
        request = process(processor, prompt)
        assert (request.prompt, request.prompt_token_ids) == (text, ids)


def test_chat_messages(processor: InputProcessor, byte_level: Tokenizer) -> None:
    request = process(processor, [USER])
    assert request.prompt == byte_level.render_chat([USER])
    assert request.prompt_token_ids == byte_level.encode(request.prompt, add_special_tokens=False)


def test_the_client_s_list_is_not_kept(processor: InputProcessor) -> None:
    ids = [3, 4, 5]
    request = process(processor, ids)
    request.sequences[0].token_ids.append(7)
    assert ids == request.prompt_token_ids == [3, 4, 5]
    ids.append(6)
    assert request.prompt_token_ids == [3, 4, 5]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ((1, 2), "prompt"),
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "multi_modal_data": {}}, "prompt"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.0]}, "prompt_token_ids"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, "a"], "prompt"),
        ([1, None], "prompt"),
        ([True, False], "prompt"),
        ([-1], "prompt"),
        ([VOCAB], "prompt"),
        ([1, 2**70], "prompt"),
        ({"prompt_token_ids": [VOCAB]}, "prompt_token_ids"),
        ("\ud800", "prompt"),
        ([{"content": "no role"}], "messages"),
        ([USER, 5], "messages"),
    ],
)
def test_bad_prompts(config: EngineConfig, model_folder: Path, prompt: Any, param: str) -> None:
    without_bos = folders.byte_level()
    without_bos.post_processor = None
    folder = folders.write_folder(model_folder.parent / "without_bos", without_bos)
    processor = InputProcessor(config, Tokenizer.from_folder(folder, "{{ messages }}"), WINDOW)
    refused(lambda: process(processor, prompt), param)


def test_token_ids_up_to_the_vocabulary(processor: InputProcessor) -> None:
    assert process(processor, [0, VOCAB - 1]).prompt_token_ids == [0, VOCAB - 1]


def test_parse_prompt_classifies() -> None:
    assert parse_prompt("x").text == "x"
    assert parse_prompt([1]).token_ids == [1]
    assert parse_prompt([USER]).messages == [USER]


# --- lengths -----------------------------------------------------------------------------------


def test_max_tokens_at_the_window_and_one_above(processor: InputProcessor) -> None:
    assert process(processor, [1] * 50, max_tokens=14).max_tokens == 14
    error = refused(lambda: process(processor, [1] * 50, max_tokens=15), "max_tokens")
    assert isinstance(error, ContextLengthError)
    assert error.code == "context_length_exceeded"
    assert "This model's maximum context length is 64 tokens" in str(error)
    assert "65 tokens (50 in the prompt, 15 in the completion)" in str(error)


def test_without_max_tokens_the_rest_of_the_window(processor: InputProcessor) -> None:
    assert process(processor, [1] * 50, max_tokens=None).max_tokens == 14
    assert process(processor, [1] * 63, max_tokens=None).max_tokens == 1
    too_long: list[tuple[Any, str]] = [
        ([1] * 64, "prompt"),
        ({"prompt_token_ids": [1] * 99}, "prompt_token_ids"),
    ]
    for prompt, param in too_long:
        error = refused(partial(process, processor, prompt, max_tokens=None), param)
        assert "This model's maximum context length is 64 tokens" in str(error)


def test_prompts_over_the_window_blame_the_prompt(processor: InputProcessor) -> None:
    refused(lambda: process(processor, [1] * 64, max_tokens=1), "prompt")
    messages = [{"role": "user", "content": "Hello 12345 " * 40}]
    error = refused(lambda: process(processor, messages, max_tokens=1), "messages")
    assert "in the messages" in str(error)


def test_absurd_texts_are_refused_unencoded(
    processor: InputProcessor, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = byte_level.max_chars_per_token
    monkeypatch.setattr(byte_level, "encode", lambda *_: pytest.fail("it was encoded"))
    error = refused(lambda: process(processor, "a" * (longest * WINDOW + 1)), "prompt")
    assert isinstance(error, ContextLengthError)
    assert "This model's maximum context length is 64 tokens" in str(error)


def test_truncation_keeps_the_end(processor: InputProcessor) -> None:
    prompt = list(range(2, 102))

    def kept(**params: Any) -> list[int]:
        return process(processor, prompt, **params).prompt_token_ids

    assert kept(truncate_prompt_tokens=3, max_tokens=1) == [99, 100, 101]
    assert kept(truncate_prompt_tokens=3, truncation_side="right", max_tokens=1) == prompt[:3]
    assert kept(truncate_prompt_tokens=-1, max_tokens=14) == prompt[-50:]
    assert kept(truncate_prompt_tokens=-1, max_tokens=None) == prompt[-63:]
    assert kept(truncate_prompt_tokens=63, max_tokens=None) == prompt[-63:]
    refused(lambda: kept(truncate_prompt_tokens=65), "truncate_prompt_tokens")
    refused(lambda: kept(truncate_prompt_tokens=64, max_tokens=None), "prompt")
    refused(lambda: kept(truncate_prompt_tokens=-1, max_tokens=64), "max_tokens")
    short = process(processor, [5, 6], truncate_prompt_tokens=9)
    assert short.prompt_token_ids == [5, 6]


# --- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad", "param"),
    [
        ({"logprobs": 20}, {"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 20}, {"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {VOCAB - 1: 1.0}}, {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        (
            {"allowed_token_ids": [0, VOCAB - 1]},
            {"allowed_token_ids": [0, VOCAB]},
            "allowed_token_ids",
        ),
        ({"stop_token_ids": [VOCAB - 1]}, {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        (
            {"max_tokens": None, "min_tokens": 62},
            {"max_tokens": None, "min_tokens": 63},
            "min_tokens",
        ),
        ({"bad_words": ["x"]}, {"bad_words": ["\ud800"]}, "bad_words"),
    ],
)
def test_parameters_at_their_limit_and_above(
    processor: InputProcessor, good: dict[str, Any], bad: dict[str, Any], param: str
) -> None:
    process(processor, [1, 2], **good)
    refused(lambda: process(processor, [1, 2], **bad), param)


def test_priority_and_salt(processor: InputProcessor) -> None:
    def request(**asked: Any) -> Request:
        asked = {"prompt": [1], **asked}
        return asyncio.run(
            processor.process("r", params=SamplingParams(), arrival_time=0.0, **asked)
        )

    assert request(priority=-3).priority == -3
    refused(lambda: request(priority="high"), "priority")
    longest = "s" * MAX_CACHE_SALT_CHARS
    keys = {request(cache_salt=salt).cache_key for salt in (None, "a", "b", longest)}
    assert len(keys) == 4
    assert b"" in keys
    assert request(prompt={"prompt_token_ids": [1], "cache_salt": "a"}).cache_key in keys
    for salt in ("", longest + "s"):
        refused(partial(request, cache_salt=salt), "cache_salt")


def test_stop_token_ids(
    config: EngineConfig, byte_level: Tokenizer, model_folder: Path, tmp_path: Path
) -> None:
    folder = folders.write_folder(
        tmp_path,
        folders.byte_level(),
        eos="<|eos|>",
        generation_config={"eos_token_id": [7, 8, 5000]},
        eos_token_id=6,
    )
    for kind in ("auto", "vllm", str(folder)):
        args = EngineArgs(model=str(folder), device="cpu", generation_config=kind)
        processor = InputProcessor(args.create_engine_config(), byte_level, WINDOW)
        eos = byte_level.eos_token_ids[0]
        assert process(processor, [1]).stop_token_ids == {6, 7, 8, eos}
        assert process(processor, [1], stop_token_ids=[9]).stop_token_ids == {6, 7, 8, 9, eos}
        request = process(processor, [1], stop_token_ids=[9], ignore_eos=True)
        assert request.stop_token_ids == {9}


def test_bad_words_with_and_without_their_space(
    processor: InputProcessor, byte_level: Tokenizer
) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(byte_level.encode(text, add_special_tokens=False))

    assert len(ids("the")) == len(ids(" the")) > 0
    request = process(processor, [1], bad_words=["the", " the", "zzz", " "])
    assert request.bad_words_ids == (ids("the"), ids(" the"), ids("zzz"), ids(" "))
    assert process(processor, [1]).bad_words_ids == ()


def test_bad_words_whose_space_changes_their_number_of_tokens(
    processor: InputProcessor, byte_level: Tokenizer
) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(byte_level.encode(text, add_special_tokens=False))

    assert len(ids("again")) > len(ids(" again"))
    for word in ("again", " again"):
        request = process(processor, [1], bad_words=[word])
        assert request.bad_words_ids == (ids("again"), ids(" again"))


@pytest.mark.parametrize("kind", [folders.byte_level, folders.sentencepiece, folders.metaspace])
def test_no_spelling_of_a_bad_word_is_allowed(
    kind: Callable[[], folders.Tokenizer], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_folder(folders.write_folder(tmp_path, kind()))
    encoder = PromptEncoder(tokenizer, vocab_size=1024, max_model_len=WINDOW)
    for word in ("the", "again", "answer", "quick", "zzz"):
        forbidden = encoder.bad_words_ids([word])
        for text in (word, f" {word}", f"( {word})", f"\n{word}", f"({word})"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            found = [
                bad
                for bad in forbidden
                if any(ids[i : i + len(bad)] == bad for i in range(len(ids)))
            ]
            assert found, (word, text)


# --- sequences ---------------------------------------------------------------------------------


def test_sequences(config: EngineConfig, byte_level: Tokenizer) -> None:
    processor = InputProcessor(config, byte_level, WINDOW)
    process(processor, [1, 2], n=6)
    request = process(processor, [1, 2], n=3)
    assert [seq.seq_id for seq in request.sequences] == [7, 8, 9]
    assert [seq.index for seq in request.sequences] == [0, 1, 2]
    assert all(seq.request is request for seq in request.sequences)
    assert all(seq.status is SequenceStatus.WAITING for seq in request.sequences)
    assert all(seq.token_ids == [1, 2] for seq in request.sequences)
    assert len({id(seq.token_ids) for seq in request.sequences}) == 3
    assert request.metrics.arrival_time == 1.0


def test_seeds(config: EngineConfig, byte_level: Tokenizer) -> None:
    def seeds(config: EngineConfig, **params: Any) -> list[int]:
        processor = InputProcessor(config, byte_level, WINDOW)
        return [seq.seed for seq in process(processor, [1], n=3, **params).sequences]

    assert seeds(config, seed=5) == [5, 6, 7]
    drawn = seeds(config)
    assert drawn == seeds(config), "the same engine seed draws the same"
    assert len({*drawn, *seeds(replace(config, seed=1))}) == 6
    for seed in (MAX_SEED, -MAX_SEED - 1, -1):
        assert all(0 <= value <= MAX_SEED for value in seeds(config, seed=seed))


def test_dynamic_rope_keys_long_prompts_by_their_length(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = folders.write_folder(tmp_path, folders.byte_level(), rope_parameters=rope)
    config = EngineArgs(model=str(folder), device="cpu").create_engine_config()
    processor = InputProcessor(config, byte_level, 256)
    keys = [
        process(processor, [1] * length, max_tokens=1).cache_key for length in (63, 64, 65, 66, 65)
    ]
    assert keys[0] == keys[1] == b""
    assert len({b"", keys[2], keys[3]}) == 3
    assert keys[2] == keys[4]


# --- defaults ----------------------------------------------------------------------------------


def with_generation_config(
    byte_level: Tokenizer, path: Path, values: Any, kind: str = "auto"
) -> InputProcessor:
    folder = folders.write_folder(path, folders.byte_level(), generation_config=values)
    args = EngineArgs(model=str(folder), device="cpu", generation_config=kind)
    return InputProcessor(args.create_engine_config(), byte_level, WINDOW)


def test_generation_config_fills_what_is_omitted(byte_level: Tokenizer, tmp_path: Path) -> None:
    values = {
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "max_new_tokens": 30,
        "min_p": None,
    }
    processor = with_generation_config(byte_level, tmp_path, values)
    params = processor.default_params({"top_p": 0.5, "temperature": None})
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 40)
    assert (params.repetition_penalty, params.min_p, params.max_tokens) == (1.1, 0.0, 30)
    assert processor.default_params({"max_tokens": None}).max_tokens == 30
    assert processor.default_params({"max_tokens": 5}).max_tokens == 5
    refused(lambda: processor.default_params({"top_p": 2.0}), "top_p")
    # The model's own length yields to the window; a client's does not.
    assert process(processor, [1] * 50, max_tokens=30).max_tokens == 14
    refused(lambda: process(processor, [1] * 50, max_tokens=29), "max_tokens")


def test_who_sets_the_same_shares_the_parameters(processor: InputProcessor) -> None:
    given = {"temperature": 1, "stop": "x"}
    params = processor.default_params(given)
    assert processor.default_params(dict(given)) is params
    assert params == SamplingParams(temperature=1, stop="x")
    assert type(processor.default_params({"temperature": 1.0, "stop": "x"}).temperature) is float
    listed = {"stop": ["x"], "logit_bias": {"5": 1.0}}  # no key of anything
    for _ in range(2):
        assert processor.default_params(listed) == SamplingParams(**listed)
    for _ in range(2):  # an error is not remembered
        refused(lambda: processor.default_params({"n": 0}), "n")


def test_generation_config_vllm_fills_nothing(byte_level: Tokenizer, tmp_path: Path) -> None:
    processor = with_generation_config(byte_level, tmp_path, {"temperature": 0.6}, "vllm")
    assert processor.default_params({}) == SamplingParams()
    assert processor.default_params({"max_tokens": None}).max_tokens is None


def test_no_generation_config(processor: InputProcessor) -> None:
    assert processor.default_params({"temperature": 0.0}).greedy
    assert processor.default_params({}).max_tokens == 16


@pytest.mark.parametrize(
    "values", [{"top_p": 7}, {"temperature": "hot"}, {"eos_token_id": "x"}, []]
)
def test_bad_generation_config_names_the_file(
    byte_level: Tokenizer, tmp_path: Path, values: Any
) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        with_generation_config(byte_level, tmp_path, values)


def test_missing_generation_config_folder(
    byte_level: Tokenizer, model_folder: Path, tmp_path: Path
) -> None:
    args = EngineArgs(model=str(model_folder), device="cpu", generation_config=str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        InputProcessor(args.create_engine_config(), byte_level, WINDOW)


# --- large texts, no tokenizer, random input ---------------------------------------------------


def test_large_texts_are_encoded_in_threads_that_end(
    config: EngineConfig, byte_level: Tokenizer
) -> None:
    before = set(threading.enumerate())
    processor = InputProcessor(config, byte_level, 100_000)
    large = "The quick brown fox. " * (LARGE_TEXT_CHARS // 10)
    messages = [{"role": "user", "content": large}]

    rendered = byte_level.render_chat(messages)

    async def all_of_them() -> None:
        params = SamplingParams(max_tokens=None)
        for prompt, expected in (
            (large, byte_level.encode(large)),
            ("small", byte_level.encode("small")),
            ([1, 2], [1, 2]),
            (messages, byte_level.encode(rendered, add_special_tokens=False)),
        ):
            request = await processor.process("r", prompt, params, 0.0)
            assert request.prompt_token_ids == expected
            assert request.max_tokens == 100_000 - len(expected)
        with pytest.raises(InvalidRequestError):
            await processor.process("r", "\ud800" * LARGE_TEXT_CHARS, params, 0.0)
        assert processor._threads is not None
        processor.close()

    asyncio.run(all_of_them())
    processor.close()
    assert not [thread for thread in threading.enumerate() if thread not in before]


def test_without_a_tokenizer(config: EngineConfig) -> None:
    processor = InputProcessor(config, None, WINDOW)
    assert process(processor, [1, 2], detokenize=False).prompt_token_ids == [1, 2]
    assert process(processor, [1, 2], detokenize=False).stop_token_ids == {1}
    refused(lambda: process(processor, "text", detokenize=False), "prompt")
    refused(lambda: process(processor, [USER], detokenize=False), "messages")
    refused(lambda: process(processor, [1, 2]), "detokenize")
    refused(lambda: process(processor, [1], detokenize=False, bad_words=["x"]), "bad_words")


def test_random_junk_is_refused_or_fits(processor: InputProcessor) -> None:
    """Nothing but `InvalidRequestError` comes out, and what passes keeps the invariant."""
    rng = random.Random(7)
    values = [
        None,
        0,
        1,
        -1,
        7,
        64,
        65,
        2**70,
        1.5,
        float("nan"),
        "",
        "abc",
        [],
        ["a"],
        [1],
        [[1]],
        {},
        {"role": "user"},
        USER,
        [USER],
        True,
        {"prompt": "x"},
        {"prompt_token_ids": [3]},
        [10**9],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "x" * 5000,
    ]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    values += [deep, 10**5000, {"prompt_token_ids": [10**5000]}, {"x" * 10_000: 1}]
    fields = list(SamplingParams.__dataclass_fields__)
    num_passed = 0
    for _ in range(3000):
        prompt = rng.choice(values)
        junk = {rng.choice(fields): rng.choice(values) for _ in range(rng.randint(0, 2))}
        junk.pop("output_kind", None)
        junk.pop("extra_args", None)
        try:
            request = process(processor, prompt, **junk)
        except InvalidRequestError as error:
            assert error.param
            continue
        num_passed += 1
        assert 0 < len(request.prompt_token_ids) < WINDOW
        assert len(request.prompt_token_ids) + request.max_tokens <= WINDOW
        assert all(0 <= i < VOCAB for i in request.prompt_token_ids)
    assert num_passed > 100


def test_the_test_folder_is_what_it_says(model_folder: Path) -> None:
    assert json.loads((model_folder / "config.json").read_text())["vocab_size"] == VOCAB
