"""The fast path to a tokenizer gives the class and the content that AutoTokenizer gives."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def declare_tokens(folder: Path, where: str | None) -> None:
    """Says more of a token than tokenizer.json, in one of the places for it."""
    if where is None:
        return
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    token = {"content": "<s>", "lstrip": True, "rstrip": False, "normalized": False}
    if where == "declared":
        content["added_tokens_decoder"] = {"0": token | {"special": True}}
        file.write_text(json.dumps(content))
    else:
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": token}))


@pytest.mark.parametrize("where", [None, "declared", "mapped"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_as_auto_tokenizer(family: str, name: str, where: str | None, tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), bos="<s>", eos="</s>", model_type=family)
    declare(tmp_path, name)
    declare_tokens(tmp_path, where)
    assert hf_tokenizer._known_class(tmp_path) is not None
    ours = load_hf_tokenizer(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert type(ours) is type(reference)
    assert ours.backend_tokenizer.to_str() == reference.backend_tokenizer.to_str()
    assert ours.special_tokens_map == reference.special_tokens_map
    assert ours.chat_template == reference.chat_template
    assert ours.init_kwargs == reference.init_kwargs
    for text in SENTENCES:
        assert ours.encode(text) == reference.encode(text)


def test_the_vocabulary_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the `tokenizers` library, and neither by Python's JSON nor for a copy."""
    write_folder(tmp_path, byte_level(), bos="<s>", eos="</s>", model_type="qwen3")
    loads, copy_of, copied = json.loads, copy.deepcopy, []

    def no_vocabulary(*args: Any, **kwargs: Any) -> Any:
        content = loads(*args, **kwargs)
        assert "model" not in content
        return content

    def noted(thing: Any, memo: Any = None) -> Any:
        copied.append(type(thing))
        return copy_of(thing, memo)

    monkeypatch.setattr(json, "loads", no_vocabulary)
    monkeypatch.setattr(copy, "deepcopy", noted)
    hf = load_hf_tokenizer(tmp_path)
    assert hf.encode(SENTENCES[0]) and type(hf.backend_tokenizer) not in copied


@pytest.mark.parametrize("content", ["[]", "{", '{"added_tokens": [{}]}'])
def test_a_broken_file_is_transformers_to_refuse(content: str, tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(Exception) as refused:
        load_hf_tokenizer(tmp_path)
    assert "msgspec" not in repr(refused.value)


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


@pytest.mark.slow
def test_what_the_short_way_does_not_import() -> None:
    code = (
        "import sys; from asyncllm.engine.text.tokenizer import Tokenizer; "
        "from asyncllm.model_config import BUILTIN_MODELS; "
        "Tokenizer.from_folder(BUILTIN_MODELS['tiny']); "
        "heavy = {'torch._dynamo', 'torch.distributed.tensor', 'sympy', 'transformers.activations',"
        "'transformers.models.auto.auto_factory'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
