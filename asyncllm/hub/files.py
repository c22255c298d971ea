"""The files of a model, in a folder or in a repository of the hub. No pickles, no code.

Weights are `model.safetensors`, or else the shards that the index names, as in
`models/checkpoint.py`; many repositories have the same weights in other formats, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

from asyncllm.errors import ModelLoadError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# One of these must have the vocabulary; without one transformers may make an empty tokenizer.
VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
    "sentencepiece.bpe.model",
)  # fmt: skip
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
SMALL = re.compile(
    r"\w[\w.-]*\.(json|jinja|txt|model|tiktoken)|additional_chat_templates/[\w.-]+\.jinja"
)
Part = Literal["config", "tokenizer", "weights"]


def size_text(num_bytes: float) -> str:
    """With three digits, in the unit in which it has one to three before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def missing_parts(folder: Path, needs: Iterable[Part]) -> list[Part]:
    """The needed parts of a model that are missing or incomplete in `folder`."""
    holds = {"config": _holds_config, "tokenizer": _holds_tokenizer, "weights": _holds_weights}
    return [part for part in needs if not holds[part](folder)]


def is_small(name: str) -> bool:
    """Whether it is a configuration, a tokenizer's file, a chat template, or the weights' index."""
    return SMALL.fullmatch(name) is not None and not name.startswith("pytorch_model")


def weight_files(folder: Path, names: Collection[str], source: str) -> list[str]:
    """The weight files among a repository's `names`. folder: has its index, if there is one.

    source: the repository's name in messages. Raises `ModelLoadError` if there are no weights.
    """
    if SINGLE_FILE in names:
        return [SINGLE_FILE]
    if INDEX_FILE not in names:
        raise ModelLoadError(f"{source}: holds no {SINGLE_FILE}{what_instead(names)}")
    shards = read_shards(folder / INDEX_FILE)
    if absent := sorted(set(shards) - set(names)):
        raise ModelLoadError(f"{source}: lacks {absent[0]}, which its {INDEX_FILE} names")
    return shards


def read_shards(index_file: Path) -> list[str]:
    """The shards that an index names, in order. Raises `ModelLoadError`."""
    return sorted(set(read_weight_map(index_file).values()))


def read_weight_map(index_file: Path) -> dict[str, str]:
    """Tensor name -> shard's file name. Raises `ModelLoadError`."""
    try:
        weight_map = json.loads(index_file.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{index_file}: no weight_map: {error!r}") from error
    if not isinstance(weight_map, dict):
        raise ModelLoadError(f"{index_file}: no weight_map: it is no object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise ModelLoadError(f"{index_file}: {name}: {shard!r} is no file name")
    return weight_map


def _holds_config(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARY_FILES)


def _holds_weights(folder: Path) -> bool:
    if (folder / SINGLE_FILE).is_file():
        return True
    index = folder / INDEX_FILE
    return index.is_file() and all((folder / name).is_file() for name in read_shards(index))


def what_instead(names: Iterable[str]) -> str:
    """The end of a message: weights in formats that are not read from a hub."""
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        return f", only pickled weights ({pickled[0]}), which are never read: that runs their code"
    gguf = [name for name in names if name.endswith(".gguf")]
    return f", only GGUF files ({gguf[0]}): download one and give its path" if gguf else ""
