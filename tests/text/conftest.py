"""Tokenizers of every shape, loaded once, and what makes engine records for the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.engine.text.tokenizer import Tokenizer
from tests.text import tokenizer_folders as folders


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer and the config of a model with a window of 64 tokens."""
    path = tmp_path_factory.mktemp("byte_level")
    return folders.write_folder(path, folders.byte_level(), bos="<|bos|>", eos="<|eos|>")


@pytest.fixture(scope="session")
def byte_level(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sentencepiece")
    folders.write_folder(path, folders.sentencepiece(), bos="<s>", eos="</s>")
    return Tokenizer.from_folder(path)


@pytest.fixture(scope="session")
def unstripped(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Sentencepiece whose decoder keeps leading spaces."""
    path = tmp_path_factory.mktemp("unstripped")
    folders.write_folder(path, folders.sentencepiece(strip=False), bos="<s>", eos="</s>")
    return Tokenizer.from_folder(path)


@pytest.fixture(scope="session", params=["metaspace", "wordpiece", "suffixed", "undecoded"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizers whose decoders do more than join bytes."""
    path = tmp_path_factory.mktemp(request.param)
    folders.write_folder(path, getattr(folders, request.param)(), eos=None)
    return Tokenizer.from_folder(path)
