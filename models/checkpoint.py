"""The safetensors files of a model folder, as one table of tensors by name.

Opening reads the headers only. Tensors are views of memory-mapped files. Pickled checkpoints (.bin)
are never opened, because reading one runs its code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncllm.errors import ModelLoadError
from asyncllm.hub.files import INDEX_FILE, SINGLE_FILE, read_weight_map

MAX_LISTED_KEYS = 5
LENGTH_BYTES = 8  # a file begins with its header's length


class Checkpoint:
    """Opens `model.safetensors` or, without it, all shards of `model.safetensors.index.json`.

    Raises `ModelLoadError` naming the file if there is none, if a shard is missing, truncated or
    corrupt, or lacks a key that the index lists.
    """

    def __init__(self, folder: Path) -> None:
        self.source = folder / SINGLE_FILE  # the file that errors name for a missing key
        if self.source.is_file():
            self._handles = {self.source: _open(self.source)}
        else:
            self.source = folder / INDEX_FILE
            self._handles = _open_shards(self.source)
        self._offsets: dict[Path, dict[str, int]] = {}
        self._files = {
            name: file for file, handle in self._handles.items() for name in _names(handle)
        }

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def file(self, name: str) -> Path:
        """The file of a tensor; for a missing one, the file that should list it."""
        return self._files.get(name, self.source)

    def header(self, name: str) -> tuple[list[int], str]:
        """Shape and safetensors dtype ("F32", "BF16", ...), without reading the tensor."""
        entry = self._handles[self._files[name]].get_slice(name)
        return list(entry.get_shape()), entry.get_dtype()

    def place(self, name: str) -> tuple[Path, int]:
        """The file of a tensor, and the offset of its first byte."""
        file = self._files[name]
        if file not in self._offsets:
            self._offsets[file] = read_offsets(file)
        return file, self._offsets[file][name]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, memory-mapped on the CPU: its bytes are read when they are used."""
        return self._handles[self._files[name]].get_tensor(name)


def list_keys(names: Collection[str]) -> str:
    """The first few names, sorted, and the number of the others."""
    listed = ", ".join(sorted(names)[:MAX_LISTED_KEYS])
    more = len(names) - MAX_LISTED_KEYS
    return f"{listed} and {more} more" if more > 0 else listed


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file}: {error}") from error


def read_offsets(file: Path) -> dict[str, int]:
    """Name -> offset of the first byte. The library checks the header, but has no offsets."""
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        header = json.loads(opened.read(header_bytes))
    first = LENGTH_BYTES + header_bytes
    return {
        name: first + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _names(handle: Any) -> set[str]:
    return set(handle.keys())


def _open_shards(index_file: Path) -> dict[Path, Any]:
    """All shards of the index, after checking that each has the keys that the index lists."""
    if not index_file.is_file():
        raise ModelLoadError(f"{index_file.parent}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    keys_by_shard: dict[str, set[str]] = {}
    for name, shard in read_weight_map(index_file).items():
        keys_by_shard.setdefault(shard, set()).add(name)
    handles = {}
    for shard, keys in sorted(keys_by_shard.items()):
        file = index_file.parent / shard
        if not file.is_file():
            raise ModelLoadError(
                f"{file}: missing, {index_file.name} names it for {list_keys(keys)}"
            )
        handles[file] = _open(file)
        if absent := keys - _names(handles[file]):
            raise ModelLoadError(
                f"{file}: lacks what {index_file.name} promises: {list_keys(absent)}"
            )
    return handles
