"""`asyncllm models`: the models in the hub's cache, their size, and how they are served."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncllm.commands.pull import add_download_dir
from asyncllm.errors import ModelLoadError
from asyncllm.hub.cache import cache_folder, cached_repos, find_snapshot, storage_folder
from asyncllm.hub.files import missing_parts, size_text
from asyncllm.model_config import BUILTIN_MODELS, ModelConfig

HELP = "list the models in the hub's cache"
HOW = {"asyncllm": "natively", "transformers": "by transformers' model code"}


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    revision: str
    bytes: int
    served: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_download_dir(parser)
    parser.add_argument("--json", action="store_true", help="one JSON array instead of lines")


def run(options: argparse.Namespace) -> int:
    cache = cache_folder(options.download_dir)
    found = [*_built_in(), *_cached(cache)]
    if options.json:
        print(json.dumps([asdict(model) for model in found]))
        return 0
    width = max(len(model.name) for model in found)
    for model in found:
        size = size_text(model.bytes)
        print(f"{model.name:{width}}  {model.revision:10}{size:>9}  {model.served}")
    print(f"in {cache}")
    return 0


def _built_in() -> Iterator[CachedModel]:
    for name, folder in BUILTIN_MODELS.items():
        yield CachedModel(name, "built in", _size(folder), _how(folder))


def _cached(cache: Path) -> Iterator[CachedModel]:
    for repo in cached_repos(cache):
        folder = find_snapshot(cache, repo)
        if folder is None:
            size = _size(storage_folder(cache, repo) / "blobs")
            yield CachedModel(repo.name, repo.revision, size, "not yet: asyncllm pull completes it")
        else:
            yield CachedModel(repo.name, repo.revision, _size(folder), _how(folder))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _how(folder: Path) -> str:
    try:
        config = ModelConfig.from_folder(folder)
        missing = missing_parts(folder, ["weights", "tokenizer"])
    except ModelLoadError as error:
        return f"not: {str(error).replace(f'{folder}/', '')}"
    if missing:
        return f"not yet: without its {' and '.join(missing)}; asyncllm pull completes it"
    return f"{HOW[config.implementation]} ({config.architecture})"
