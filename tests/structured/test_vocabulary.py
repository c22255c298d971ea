"""Tokenizers of other shapes: what their tokens' bytes are, and how a forced text is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.engine.structured.compiler import GrammarCompiler
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.structured.walks import accept, new_constraint
from tests.text import tokenizer_folders as folders


def load(path: Path, name: str, strip: bool | None = None) -> Tokenizer:
    raw = folders.sentencepiece(strip) if strip is not None else getattr(folders, name)()
    specials = {"bos": "<s>", "eos": "</s>"} if strip is not None else {"eos": None}
    folders.write_folder(path, raw, **specials)
    return Tokenizer.from_folder(path)


@pytest.mark.parametrize("strip", [True, False], ids=["llama 2", "gemma"])
@pytest.mark.parametrize(
    "text", ["hello world", " leading", "two  spaces", "x", "é and 😀", "a </s> b", "\x02!", "▁"]
)
def test_a_forced_text_is_that_text(text: str, strip: bool, tmp_path: Path) -> None:
    """No space in front, as a sentencepiece tokenizer would put it, and no special token in it."""
    tokenizer = load(tmp_path, "sentencepiece", strip)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    compiler = GrammarCompiler(lambda: vocabulary)
    constraint = new_constraint(compiler, StructuredOutputsParams(choice=[f"{text}."]))
    written = b""
    while written != f"{text}.".encode():
        forced = constraint.forced_tokens()
        assert forced and tokenizer.special_ids.isdisjoint(forced)
        for token_id in forced:
            accept(constraint, token_id)
            written += tokenizer.token_bytes(token_id)
        assert f"{text}.".encode().startswith(written)


@pytest.mark.parametrize("name", ["metaspace", "wordpiece", "suffixed", "undecoded"])
def test_decoders_that_do_more_than_join_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="decoder"):
        Vocabulary(load(tmp_path, name), 400, [1])
