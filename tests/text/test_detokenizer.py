"""Incremental detokenising against decoding everything at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncllm.engine.text.detokenizer import TableDetokenizer, WindowDetokenizer
from asyncllm.engine.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import id_of

PROPERTY = settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
IDS = st.lists(st.integers(0, 700), max_size=24)  # beyond every vocabulary here
MARKER = "▁"  # a space, to SentencePiece
TEXT = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters=MARKER), max_size=40
)
NOTABLE_TEXTS = [
    "plain ASCII text",
    " leading and trailing ",
    "  two leading spaces",
    "naïve café über",
    "你好世界 こんにちは",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 done",
    "e\u0301a\u0308\u200d\ufe0f",
    "tabs\t\nand\r\nlines\n\n",
    "\ufffd real replacement \ufffd",
]


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(prompt, skip)
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


def library_decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    return tokenizer._raw.decode(ids, skip_special_tokens=skip)


def random_ids(tokenizer: Tokenizer, rng: random.Random, most: int = 24) -> list[int]:
    """Mostly any tokens, at times many bytes of several in a row."""
    ids: list[int] = []
    while len(ids) < most and rng.random() < 0.9:
        kind = rng.random()
        if kind < 0.4:
            ids.append(rng.randrange(tokenizer.vocab_size + 20))
        elif kind < 0.5:
            ids.append(rng.choice(sorted(tokenizer.special_ids)))
        elif kind < 0.8:
            ids += tokenizer.encode(rng.choice("ä世😀e\u0301 \n"), add_special_tokens=False)
        else:
            ids += tokenizer.encode("😀世", add_special_tokens=False)[: rng.randrange(1, 4)]
    return ids


# --- byte-level --------------------------------------------------------------------------------


@PROPERTY
@given(ids=IDS, skip=st.booleans())
def test_byte_level_ids_equal_the_library(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    whole = library_decode(byte_level, ids, skip)
    assert byte_level.decode(ids, skip) == whole
    assert stream(byte_level, ids, [], skip) == whole


def test_byte_level_random_ids_after_a_prompt(byte_level: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(1500):
        prompt, ids = random_ids(byte_level, rng, 8), random_ids(byte_level, rng)
        skip = rng.random() < 0.5
        before = stream(byte_level, prompt, [], skip)
        detokenizer = byte_level.detokenizer([], skip)
        whole_before = "".join(detokenizer.push(i) for i in prompt)  # the open character left out
        assert before.startswith(whole_before)
        expected = library_decode(byte_level, prompt + ids, skip)
        assert whole_before + stream(byte_level, ids, prompt, skip) == expected, (prompt, ids)


@PROPERTY
@given(text=TEXT)
def test_byte_level_text_comes_back(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    detokenizer = byte_level.detokenizer(byte_level.encode("a prompt"))
    got = ""
    for count, token_id in enumerate(ids, start=1):
        got += detokenizer.push(token_id)
        # Nothing is early, and nothing that is whole is late.
        data = b"".join(byte_level.token_bytes(i) for i in ids[:count])
        assert got == data.decode("utf-8", "ignore")
    assert detokenizer.flush() == ""
    assert got == text


def test_incomplete_characters_wait_and_invalid_bytes_do_not(byte_level: Tokenizer) -> None:
    by_byte = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    first, second, third, fourth = (by_byte[bytes([byte])] for byte in "😀".encode())
    push = byte_level.detokenizer([]).push
    assert [push(i) for i in (first, second, third, fourth)] == ["", "", "", "😀"]
    detokenizer = byte_level.detokenizer([])
    assert [detokenizer.push(i) for i in (first, second, by_byte[b"a"])] == ["", "", "\ufffda"]
    assert [detokenizer.push(i) for i in (second, first)] == ["\ufffd", ""]
    assert detokenizer.flush() == "\ufffd"


def test_special_token_inside_a_character(byte_level: Tokenizer) -> None:
    by_byte = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    eos = byte_level.eos_token_ids[0]
    parts = [by_byte[bytes([byte])] for byte in "é".encode()]
    skipping, keeping = byte_level.detokenizer([], True), byte_level.detokenizer([], False)
    ids = [parts[0], eos, parts[1]]
    assert [skipping.push(i) for i in ids] == ["", "", "é"]
    assert [keeping.push(i) for i in ids] == ["", "\ufffd<|eos|>", "\ufffd"]


def test_the_prompt_may_begin_a_character(byte_level: Tokenizer) -> None:
    by_byte = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    parts = [by_byte[bytes([byte])] for byte in "😀".encode()]
    for cut in range(1, 4):
        prompt = [*byte_level.encode("so "), *parts[:cut]]
        assert stream(byte_level, parts[cut:], prompt, True) == "😀"


# --- sentencepiece with byte fallback ----------------------------------------------------------


def spoiled_decode(tokenizer: Tokenizer, ids: list[int], skip: bool, num_stripped: int) -> str:
    """The slow oracle: characters one by one, each invalid byte U+FFFD by itself."""
    hidden = tokenizer.special_ids if skip else frozenset()
    data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in hidden)
    text, position = "", 0
    while position < len(data):
        for size in range(1, 5):
            try:
                text += data[position : position + size].decode()
                position += size
                break
            except UnicodeDecodeError:
                continue
        else:
            text += "\ufffd"
            position += 1
    return text[num_stripped:] if text.startswith(" " * num_stripped) else text


@pytest.mark.parametrize(("name", "num_stripped"), [("sentencepiece", 1), ("unstripped", 0)])
def test_sentencepiece_random_ids(
    name: str, num_stripped: int, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    rng = random.Random(2)
    num_equal = 0
    for _ in range(2000):
        ids, skip = random_ids(tokenizer, rng), rng.random() < 0.5
        expected = spoiled_decode(tokenizer, ids, skip, num_stripped)
        assert stream(tokenizer, ids, [], skip) == expected, ids
        assert tokenizer.decode(ids, skip) == expected
        if "\ufffd" not in expected:
            num_equal += 1
            assert library_decode(tokenizer, ids, skip) == expected, ids
    assert num_equal > 500


def test_sentencepiece_random_ids_after_a_prompt(sentencepiece: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(1500):
        text, skip = rng.choice(["", " ", "So it begins:", "世界 "]), rng.random() < 0.5
        prompt = sentencepiece.encode(text)
        ids = random_ids(sentencepiece, rng)
        whole = spoiled_decode(sentencepiece, prompt + ids, skip, 1)
        before = spoiled_decode(sentencepiece, prompt, skip, 1)
        assert before + stream(sentencepiece, ids, prompt, skip) == whole, (prompt, ids)


@PROPERTY
@given(text=TEXT)
def test_sentencepiece_text_comes_back(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert stream(sentencepiece, ids, [], True) == library_decode(sentencepiece, ids, True) == text


def test_only_the_text_s_first_space_is_stripped(sentencepiece: Tokenizer) -> None:
    bos = sentencepiece.bos_token_id
    assert bos is not None
    hello = sentencepiece.encode("The", add_special_tokens=False)
    assert stream(sentencepiece, hello + hello, [bos], True) == "The The"
    assert stream(sentencepiece, hello + hello, [bos, *hello], True) == " The The"
    assert stream(sentencepiece, hello, [bos], False) == " The", (
        "a kept <s> is the text's beginning"
    )


def test_incomplete_byte_fallback_is_one_mark_a_byte(sentencepiece: Tokenizer) -> None:
    ids = [id_of(sentencepiece._raw, f"<0x{byte:02X}>") for byte in "😀".encode()]
    assert stream(sentencepiece, ids[:3], [], True) == "\ufffd" * 3
    assert library_decode(sentencepiece, ids[:3], True) == "\ufffd" * 3
    assert stream(sentencepiece, ids, [], True) == "😀"


# --- every tokenizer ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "unstripped"])
@pytest.mark.parametrize("text", NOTABLE_TEXTS)
def test_notable_texts(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, ids, [], True) == text
    half = len(ids) // 2
    assert tokenizer.detokenizer(ids[:half]), "a prompt may end anywhere"
    before = tokenizer.detokenizer([])
    joined = "".join(before.push(i) for i in ids[:half]) + stream(
        tokenizer, ids[half:], ids[:half], True
    )
    assert joined == text


def test_fast_tables_are_used_where_they_can_be(
    byte_level: Tokenizer, sentencepiece: Tokenizer, windowed: Tokenizer
) -> None:
    assert isinstance(byte_level.detokenizer([]), TableDetokenizer)
    assert isinstance(sentencepiece.detokenizer([]), TableDetokenizer)
    assert isinstance(windowed.detokenizer([]), WindowDetokenizer)


# --- decoders without a table ------------------------------------------------------------------


def test_windowed_random_ids(windowed: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(500):
        skip = rng.random() < 0.5
        prompt = [rng.randrange(windowed.vocab_size) for _ in range(rng.randrange(12))]
        ids = [rng.randrange(windowed.vocab_size + 10) for _ in range(rng.randrange(24))]
        whole = library_decode(windowed, prompt + ids, skip)
        before = library_decode(windowed, prompt, skip)
        assert whole.startswith(before), "these decoders never take text back"
        assert before + stream(windowed, ids, prompt, skip) == whole, (prompt, ids)


def test_window_holds_characters_split_over_tokens(sentencepiece: Tokenizer) -> None:
    """The window detokeniser on a tokenizer that has a table: it must do without as well."""
    make = windowed_like(sentencepiece)
    for text in NOTABLE_TEXTS[:-1]:
        ids = sentencepiece.encode(text, add_special_tokens=False)
        detokenizer = make([])
        deltas = [detokenizer.push(i) for i in ids]
        assert "".join(deltas) + detokenizer.flush() == text
        assert not any("\ufffd" in delta for delta in deltas)


def test_window_gives_up_on_what_is_no_character(sentencepiece: Tokenizer) -> None:
    invalid = id_of(sentencepiece._raw, "<0xFF>")
    detokenizer = windowed_like(sentencepiece)([])
    deltas = [detokenizer.push(invalid) for _ in range(40)]
    assert sum(map(len, deltas)) >= 36, "at most one character's worth is held"
    assert len(detokenizer._window) < 20
    assert "".join(deltas) + detokenizer.flush() == "\ufffd" * 40


def test_window_stays_small_while_nothing_is_shown(windowed: Tokenizer) -> None:
    detokenizer = windowed.detokenizer([])
    assert isinstance(detokenizer, WindowDetokenizer)
    for _ in range(500):
        detokenizer.push(windowed.vocab_size + 5)
    assert len(detokenizer._window) == 0


def test_spaces_between_special_tokens() -> None:
    words = {1: "<a>", 2: "<b>", 3: "word"}
    for spaces, expected in ((True, "word <a> <b> word"), (False, "word <a><b> word")):
        detokenizer = WindowDetokenizer(
            decode=lambda ids: " ".join(words[i] for i in ids),
            is_shown=lambda i: True,
            prompt_ids=[],
            unspaced={} if spaces else {1: "<a>", 2: "<b>"},
        )
        assert "".join(detokenizer.push(i) for i in (3, 1, 2, 3)) == expected


def windowed_like(tokenizer: Tokenizer) -> Callable[[list[int]], WindowDetokenizer]:
    return lambda prompt: WindowDetokenizer(
        decode=lambda ids: library_decode(tokenizer, ids, True),
        is_shown=lambda i: i not in tokenizer.special_ids,
        prompt_ids=prompt,
        unspaced={},
    )
