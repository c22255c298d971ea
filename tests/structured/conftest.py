from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import asyncllm
from asyncllm.engine.structured import compiler as compiler_module
from asyncllm.engine.structured.compiler import CompiledGrammar, GrammarCompiler
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.structured.walks import compile_now
from tests.waiting import PATIENCE_SECONDS

TINY = Path(asyncllm.__file__).parent / "assets" / "tiny"


@pytest.fixture(autouse=True)
def _no_machine_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "STRUCTURED_OUTPUT_COMPILE_SECONDS", PATIENCE_SECONDS)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(lambda: vocabulary)


@pytest.fixture
def compiled(compiler: GrammarCompiler) -> Callable[..., CompiledGrammar]:
    """Compile what `StructuredOutputsParams` is given by these fields."""
    return lambda **fields: compile_now(compiler, StructuredOutputsParams(**fields))
