"""Forced text is cut into the tokenizer's own tokens without Python, where that can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from asyncllm.engine.structured import byte_bpe as byte_bpe_module
from asyncllm.engine.structured import vocabulary as vocabulary_module
from asyncllm.engine.structured.byte_bpe import LONGEST_RUN, bounded, byte_bpe
from asyncllm.engine.structured.compiler import GrammarCompiler
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.structured.walks import accept, compile_now
from tests.text import tokenizer_folders as folders

SCHEMA = {
    "type": "object",
    "properties": {"temperature_in_celsius": {"type": "integer"}, "it's\n  a key": {}},
    "required": ["temperature_in_celsius", "it's\n  a key"],
}
TEXTS = ["{'answer': 42}", "don't  stop\n\n", '"}, {"kind": "small"', "é and 😀", "x" * 200]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts that Python was asked to cut."""
    texts: list[str] = []
    call = vocabulary_module._Words.__call__

    def asks(self: object, text: str) -> list[int]:
        texts.append(text)
        return call(self, text)  # type: ignore[arg-type]

    monkeypatch.setattr(vocabulary_module._Words, "__call__", asks)
    yield texts


def made(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def write(vocabulary: Vocabulary, params: StructuredOutputsParams, most: int = 40) -> list[int]:
    """Tokens by the first that each mask allows."""
    constraint = compile_now(GrammarCompiler(lambda: vocabulary), params).constraint(False)
    bits = np.zeros((1, -(-vocabulary_size(vocabulary) // 32)), np.int32)
    written: list[int] = []
    for _ in range(most):
        assert constraint.fill_many([constraint], bits) == [None]
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
        written.append(int(allowed[0]))
        if written[-1] in vocabulary.eos_ids:
            break
        accept(constraint, written[-1])
    return written


def vocabulary_size(vocabulary: Vocabulary) -> int:
    return len(vocabulary._words.tokens)


def test_masks_ask_python_nothing(tokenizer: Tokenizer, asked: list[str]) -> None:
    vocabulary = made(tokenizer)
    asked.clear()
    written = write(vocabulary, StructuredOutputsParams(json=SCHEMA))
    assert not asked
    assert "temperature_in_celsius" in tokenizer.decode(written)


@pytest.mark.parametrize("text", [*TEXTS, "<|im_end|> is text"])
def test_forced_text_has_the_tokenizers_own_tokens(
    text: str, tokenizer: Tokenizer, asked: list[str]
) -> None:
    vocabulary = made(tokenizer)
    asked.clear()
    *written, end = write(vocabulary, StructuredOutputsParams(choice=[text]), most=400)
    assert end in vocabulary.eos_ids and not asked
    assert b"".join(map(tokenizer.token_bytes, written)) == text.encode()
    assert tokenizer.special_ids.isdisjoint(written)
    if "<|im_end|>" not in text:
        assert written == tokenizer.encode(text, False)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", " ", '"', "--"])
@pytest.mark.parametrize("kind", ["x", "7", "-", " ", "\n", "e\u0301"])
def test_a_long_run_is_cut(
    first: str, kind: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into pieces of which each takes little time, and no text is lost by it."""
    text = first + kind * 5000
    ll = made(tokenizer).tokenizer_for("")
    written = ll.tokenize_str(text)
    assert b"".join(map(tokenizer.token_bytes, written)) == text.encode()
    monkeypatch.setattr(byte_bpe_module, "bounded", lambda pattern: pattern)
    whole = made(tokenizer).tokenizer_for("").tokenize_str(text)
    assert len(whole) <= len(written) <= len(whole) + 2 * 5000 * len(kind) // LONGEST_RUN + 1


def test_no_piece_of_a_bounded_pattern_is_long(tokenizer: Tokenizer) -> None:
    pattern = bounded(tokenizer.split_pattern or "")
    assert pattern is not None
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for first, kind in itertools.product(["", " ", '"', "--", "\n", "x-"], 'x7- \n"é漢'):
        pieces = split.pre_tokenize_str(first + kind * 3000)
        assert "".join(piece for piece, _ in pieces) == first + kind * 3000
        assert max(len(piece) for piece, _ in pieces) <= 2 * LONGEST_RUN + 1


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r" ?\p{L}+|\s*", r" ?\p{L}{1,128}|\s{0,128}"),
        (r"[+*]?\+\*[^\]+]{1,3}", r"[+*]?\+\*[^\]+]{1,3}"),
        (r"(?i:'s|'t)?(?!\S)", r"(?i:'s|'t)?(?!\S)"),
        *((endless, None) for endless in (r"a++", r"a+?", r"x*+", r"(?:ab)+", r"(a)*", r"a{3,}")),
    ],
)
def test_patterns_are_bounded(pattern: str, expected: str | None) -> None:
    assert bounded(pattern) == expected


def test_an_added_token_comes_whole(tokenizer: Tokenizer, asked: list[str]) -> None:
    """However the text before it ends."""
    text = '{"a": {}}</tool_call>'
    assert "</tool_call>" in tokenizer.added_texts
    *written, _ = write(made(tokenizer), StructuredOutputsParams(choice=[text]))
    assert asked
    assert tokenizer.token_text(written[-1]) == "</tool_call>"
    assert written == tokenizer.encode(text, False)


def test_what_such_grammars_need_is_prepared_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: made(tokenizer))
    compiler.prepare()
    vocabulary = compiler._vocabulary
    assert vocabulary is not None and vocabulary._asking is None
    compiler.prepare()
    prepared = vocabulary._asking
    assert prepared is not None and vocabulary.tokenizer_for("<tool_call>") is prepared
    assert vocabulary.tokenizer_for("<tool>") is not prepared


def of(raw: RawTokenizer, path: Path, eos: str | None = None) -> Tokenizer:
    folders.write_folder(path, raw, eos=eos)
    return Tokenizer.from_folder(path)


def bpe_of(tokenizer: Tokenizer) -> object:
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    return byte_bpe(tokenizer, tokens, tokenizer.special_tokens, [1])


def test_other_tokenizers_are_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert bpe_of(of(folders.byte_level(), tmp_path / "own", "<|eos|>")) is not None
    assert bpe_of(of(folders.sentencepiece(), tmp_path / "other")) is None
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    assert byte_bpe(tokenizer, tokens, tokenizer.special_tokens, [1]) is not None
    twice, none = tokens.copy(), tokens.copy()
    twice[300] = twice[301]
    none[tokens.index(b"a")] = b""
    for other in (twice, none):  # two of one text, and a byte that no token is
        assert byte_bpe(tokenizer, other, tokenizer.special_tokens, [1]) is None


def test_tokens_that_are_not_numbered_as_they_were_merged(tmp_path: Path) -> None:
    """Merges in another order than ids: what is merged first is not to be seen by the ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["th", "he", "the", "er", "her", "an", "na", "on", "no", "in", "ni", "re"]
    vocab = {token: i for i, token in enumerate([*alphabet, *words, "<e>"])}
    merges = [(word[:-1], word[-1]) for word in words if len(word) == 2]
    merges += [("th", "e"), ("he", "r")]

    def model(order: list[tuple[str, str]]) -> RawTokenizer:
        raw = RawTokenizer(models.BPE(vocab=vocab, merges=order))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens(["<e>"])
        return raw

    by_id = sorted(merges, key=lambda pair: vocab["".join(pair)])
    assert bpe_of(of(model(by_id), tmp_path / "in order", "<e>")) is not None
    assert bpe_of(of(model(by_id[::-1]), tmp_path / "reversed", "<e>")) is None
