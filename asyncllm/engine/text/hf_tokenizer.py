"""Loads transformers' tokenizer of a folder without imports that only models need.

AutoTokenizer imports the family's configuration class, and in some versions the generation code
with scikit-learn and pandas, which takes seconds. For the declarations below, the class that it
would choose is known (a test compares); all other folders are loaded by AutoTokenizer.

Reading a vocabulary holds the GIL, which the model's thread needs, so the file is read only once.
transformers would read it again for the few added tokens, and before 5.21 copied it.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_GENERIC = ("transformers.tokenization_utils_tokenizers", "TokenizersBackend")
_QWEN2 = ("transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer")
# model_type -> tokenizer_class of the folder -> module and class
_KNOWN = {
    "llama": {"PreTrainedTokenizerFast": _GENERIC, "TokenizersBackend": _GENERIC},
    "qwen2": {"Qwen2Tokenizer": _QWEN2, "Qwen2TokenizerFast": _QWEN2},
    "qwen3": {
        "PreTrainedTokenizerFast": _GENERIC,
        "TokenizersBackend": _GENERIC,
        "Qwen2Tokenizer": _QWEN2,
        "Qwen2TokenizerFast": _QWEN2,
    },
}
# Files whose tokens transformers adds to those of tokenizer.json if the configuration has none.
_MORE_TOKENS = ("special_tokens_map.json", "added_tokens.json")


def load_hf_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Raises the library's errors, which have no common base class."""
    known = _known_class(folder)
    if known is None:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    module, name = known
    chosen = getattr(import_module(module), name)
    loading = _reading_once(chosen) if known == _GENERIC else chosen
    hf = loading.from_pretrained(folder, local_files_only=True, **_added_tokens(folder))
    hf.__class__ = chosen
    return hf


def _reading_once(generic: Any) -> Any:
    """A subclass whose constructor reads the file, as transformers does since 5.21."""

    def convert_to_native_format(cls: type, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    return type(
        generic.__name__,
        (generic,),
        {"convert_to_native_format": classmethod(convert_to_native_format)},
    )


class _AddedTokens(msgspec.Struct):
    """The part of tokenizer.json that is decoded; the vocabulary is skipped."""

    added_tokens: list[dict[str, Any]]


def _added_tokens(folder: Path) -> dict[str, Any]:
    """The argument with which transformers need not read the file for its added tokens; empty if
    other files have them."""
    declared = "added_tokens_decoder" in _read(folder / "tokenizer_config.json")
    if declared or any((folder / name).exists() for name in _MORE_TOKENS):
        return {}
    try:
        file = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_AddedTokens)
        return {"added_tokens_decoder": {token.pop("id"): token for token in file.added_tokens}}
    except (OSError, ValueError, KeyError):  # transformers will report it
        return {}


def _known_class(folder: Path) -> tuple[str, str] | None:
    if not (folder / "tokenizer.json").is_file() or (folder / "tekken.json").exists():
        return None
    declared = _read(folder / "tokenizer_config.json")
    model_type = _read(folder / "config.json").get("model_type")
    name = declared.get("tokenizer_class")
    if "auto_map" in declared or not isinstance(name, str) or not isinstance(model_type, str):
        return None
    return _KNOWN.get(model_type, {}).get(name)


def _read(file: Path) -> dict[str, Any]:
    """The JSON object of a file; {} if it has none, which AutoTokenizer will report."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
