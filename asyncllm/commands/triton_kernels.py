"""Which Triton kernels a start of a model compiles: the list that a build leaves in our cache.

Triton names a variant by all that its compiler was given, which only a launch says. So nobody can
ask for what is missing; but what a start launched once, the next one launches too.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.host import cache_folder

logger = logging.getLogger("asyncllm")


@dataclass(frozen=True, slots=True)
class CachedVariant:
    """One variant, as Triton's cache has it: `file` is there as long as it need not be compiled."""

    name: str
    file: str

    @property
    def is_built(self) -> bool:
        return Path(self.file).exists()


@contextmanager
def print_compiled() -> Iterator[list[CachedVariant]]:
    """Fills the list with what is launched meanwhile; a line for each that had to be compiled."""
    from triton import knobs

    launched: list[CachedVariant] = []

    def listener(
        *, metadata: dict[str, Any], metadata_group: dict[str, str], cache_hit: bool, **_: Any
    ) -> None:
        name = str(metadata.get("name"))
        launched.append(CachedVariant(name, metadata_group[f"{name}.json"]))
        if not cache_hit:
            print(f"  {name}", flush=True)

    before, knobs.compilation.listener = knobs.compilation.listener, listener
    try:
        yield launched
    finally:
        knobs.compilation.listener = before


def write_list(config: EngineConfig, kernels: list[CachedVariant]) -> None:
    path = _path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(list(dict.fromkeys(kernels))))


def read_list(config: EngineConfig) -> list[CachedVariant] | None:
    """The kernels of the last `write_list` for such a start; None without one that is readable."""
    path = _path(config)
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[CachedVariant])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is no list of kernels: %s", path, error)
        return None


def _path(config: EngineConfig) -> Path:
    """One for all starts that launch the same kernels."""
    import torch
    import triton

    given = [
        version("asyncllm"),
        triton.__version__,  # its distribution has another name where torch brings its own
        *torch.cuda.get_device_capability(),
        *(config.dtype, config.block_size, config.attention_backend),
        (config.model.path / "config.json").read_text(),
    ]
    key = hashlib.sha256(json.dumps(given).encode())
    return cache_folder() / f"triton-{key.hexdigest()[:16]}.json"
