"""The short way to a tokenizer gives the class and the content that AutoTokenizer gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncllm.engine.text import hf_tokenizer
from asyncllm.engine.text.hf_tokenizer import load_hf_tokenizer
from tests.text.tokenizer_folders import SENTENCES, byte_level, write_folder
from tests.waiting import PATIENCE_SECONDS

CASES = [(family, name) for family, names in hf_tokenizer._KNOWN.items() for name in names]


def declare(folder: Path, tokenizer_class: str | None) -> None:
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content.pop("tokenizer_class")
    if tokenizer_class is not None:
        content["tokenizer_class"] = tokenizer_class
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_as_auto_tokenizer(family: str, name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), bos="<s>", eos="</s>", model_type=family)
    declare(tmp_path, name)
    assert hf_tokenizer._known_class(tmp_path) is not None
    ours, reference = load_hf_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(reference)
    assert ours.backend_tokenizer.to_str() == reference.backend_tokenizer.to_str()
    assert ours.special_tokens_map == reference.special_tokens_map
    assert ours.chat_template == reference.chat_template
    for text in SENTENCES:
        assert ours.encode(text) == reference.encode(text)


@pytest.mark.parametrize(
    ("family", "name"),
    [("mistral", "PreTrainedTokenizerFast"), ("llama", "LlamaTokenizerFast"), ("llama", None)],
)
def test_other_declarations_are_auto_tokenizers_to_read(
    family: str, name: str | None, tmp_path: Path
) -> None:
    write_folder(tmp_path, byte_level(), model_type=family)
    declare(tmp_path, name)
    assert hf_tokenizer._known_class(tmp_path) is None
    assert type(load_hf_tokenizer(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))


def test_what_the_short_way_does_not_import() -> None:
    code = (
        "import sys; from asyncllm.engine.text.tokenizer import Tokenizer; "
        "from asyncllm.model_config import BUILTIN_MODELS; "
        "Tokenizer.from_folder(BUILTIN_MODELS['tiny']); "
        "heavy = {'torch._dynamo', 'torch.distributed.tensor', 'sympy', 'transformers.activations',"
        "'transformers.models.auto.auto_factory'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
