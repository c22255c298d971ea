"""transformers' tokenizer of a folder, without importing what only models need.

AutoTokenizer brings in the family's configuration class, and with some versions the generation
code with scikit-learn and pandas: seconds of a start. For the declarations below the class that it
chooses is known (a test asks it); every other folder is AutoTokenizer's to load.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_GENERIC = ("transformers.tokenization_utils_tokenizers", "TokenizersBackend")
_QWEN2 = ("transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer")
# model_type -> the tokenizer_class that a folder declares -> module and class
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


def load_hf_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Raises what the library raises, which has no common base."""
    known = _known_class(folder)
    if known is not None:
        module, name = known
        return getattr(import_module(module), name).from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


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
    """{} for what is no JSON object: AutoTokenizer says what is wrong with it."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
