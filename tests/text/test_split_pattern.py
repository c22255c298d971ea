"""Which tokenizers cut a text by one regex and merge bytes, and by which."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from asyncllm.engine.text.split_pattern import GPT2_PATTERN, split_pattern
from tests.text import tokenizer_folders as folders

OWN = r"\p{L}+|\p{N}+|[^\p{L}\p{N}\s]+|\s+"


def by_own_pattern(
    behavior: str = "isolated", use_regex: bool = False, more: int = 0, pattern: str = OWN
) -> Tokenizer:
    tokenizer = folders.byte_level()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior) for _ in range(1 + more)]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    return tokenizer


def test_the_pattern_is_found() -> None:
    assert split_pattern(folders.byte_level()) == GPT2_PATTERN
    assert split_pattern(by_own_pattern()) == OWN
    normalizing = by_own_pattern()
    normalizing.normalizer = normalizers.NFC()
    assert split_pattern(normalizing) == OWN


def test_the_librarys_own_pattern_cuts_alike() -> None:
    """ByteLevel by itself, and a split by GPT2_PATTERN before it."""
    by_itself = folders.byte_level().pre_tokenizer
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in [*folders.SENTENCES, "don't  stop\n\n  x1 22", " '  ' ", "a\tb \u00a0c"]:
        assert by_itself.pre_tokenize_str(text) == split.pre_tokenize_str(text)


def change(edit: Callable[[Tokenizer], object]) -> Tokenizer:
    tokenizer = folders.byte_level()
    edit(tokenizer)
    return tokenizer


OTHERS = {
    "sentencepiece": folders.sentencepiece,
    "words": lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    "not by bytes": lambda: change(
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace())
    ),
    "no pieces": lambda: change(lambda t: setattr(t, "pre_tokenizer", None)),
    "a space in front": lambda: change(
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))
    ),
    "lower case": lambda: change(lambda t: setattr(t, "normalizer", normalizers.Lowercase())),
    "chance": lambda: change(lambda t: setattr(t.model, "dropout", 0.5)),
    "split twice": lambda: by_own_pattern(use_regex=True),
    "two patterns": lambda: by_own_pattern(more=1),
    "words with signs": lambda: by_own_pattern(pattern=r"\S+|\s+"),
    "matches are dropped": lambda: by_own_pattern(behavior="removed"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_none(name: str) -> None:
    assert split_pattern(OTHERS[name]()) is None
