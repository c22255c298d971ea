"""`quantization_config` of a checkpoint: which linear layers are quantised, and how.

There is one reader per group of the configuration, shared by the parts of merged layers. Settings
that are not supported exactly are refused here, naming the key.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ModelConfig, read_json_object
from asyncllm.models.name_pattern import name_pattern

MODELOPT_FILE = "hf_quant_config.json"


class Keys:
    """Looks up and checks the keys of a configuration object.

    Errors are `ModelLoadError`s that name the file, the key and its value.
    """

    def __init__(self, content: Mapping[str, Any], file: Path, prefix: str) -> None:
        self._content = content
        self._file = file
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._content.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        value = self._content.get(key)
        return default if value is None else value

    def one_of(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        value = self.get(key, default)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            only = ", ".join(map(repr, allowed))
            raise ModelLoadError(
                f"{self._file}: {self._prefix}{key} {value!r} is not served, only {only}"
            )
        return value

    def size(self, key: str, default: int | None = None) -> int | None:
        """A positive number of columns. None, for all columns, if it is -1 or null."""
        value = self.get(key, default)
        if value is None or value == -1:
            return None
        if type(value) is not int or value < 1:
            raise self.error(key, "must be a positive integer, or -1 for whole rows")
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        """Rows and columns of a block; None where the key is missing."""
        block = self.get(key)
        if block is None:
            return None
        if not isinstance(block, list) or not all(type(n) is int and n > 0 for n in block):
            raise self.error(key, "must be two positive integers")
        if len(block) != 2:
            raise self.error(key, "must be two integers")
        return block[0], block[1]

    def names(self, *keys: str) -> list[str]:
        """The lists under these keys, joined."""
        found: list[str] = []
        for key in keys:
            value = self.get(key, [])
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self.error(key, "must be a list of names")
            found += value
        return found

    def pattern(self, key: str, text: str) -> re.Pattern[str]:
        """A regular expression under a key, to match names of layers with."""
        try:
            return name_pattern(text)
        except ValueError as error:
            raise ModelLoadError(f"{self._file}: {self._prefix}{key}: {error}") from error

    def child(self, key: str) -> Keys:
        """An object under a key, or an empty one."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return Keys(value, self._file, f"{self._prefix}{key}.")

    def children(self, key: str) -> dict[str, Keys]:
        """The objects under a key, by their names."""
        child = self.child(key)
        return {name: child.child(name) for name in child._content}

    def error(self, key: str, reason: str) -> ModelLoadError:
        """`reason` continues after the key's value."""
        return ModelLoadError(f"{self._file}: {self._prefix}{key} {self.get(key)!r} {reason}")


def quantization_keys(config: ModelConfig) -> tuple[str, Keys] | None:
    """The name of the quantisation method, and its keys; None if the checkpoint has none."""
    hf, file = config.hf_config, config.path / "config.json"
    content: Any = getattr(hf, "quantization_config", None)
    if content is None:
        content = getattr(hf, "compression_config", None)
    if content is None:
        return _modelopt_keys(config.path / MODELOPT_FILE)
    if not isinstance(content, dict):
        to_dict: Callable[[], dict[str, Any]] | None = getattr(content, "to_dict", None)
        if to_dict is None:
            raise ModelLoadError(f"{file}: quantization_config must be an object")
        content = to_dict()
    keys = Keys(content, file, "quantization_config: ")
    return str(keys.get("quant_method", "")), keys


def _modelopt_keys(file: Path) -> tuple[str, Keys] | None:
    """The configuration in modelopt's own file, as older versions write it."""
    if not file.is_file():
        return None
    return "modelopt", Keys(read_json_object(file), file, "").child("quantization")


def named_by(names: Sequence[str]) -> Callable[[str], bool]:
    """A test whether a layer is below one of these modules, named in full or by their last
    parts."""
    patterns = [re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?") for name in names]
    return lambda layer: any(pattern.fullmatch(layer) for pattern in patterns)


def named_by_glob(names: Sequence[str]) -> Callable[[str], bool]:
    exact = named_by([name for name in names if "*" not in name])
    globs = [name for name in names if "*" in name]
    return lambda layer: exact(layer) or any(fnmatch.fnmatchcase(layer, glob) for glob in globs)


def targeted_by(keys: Keys, key: str) -> Callable[[str], bool]:
    """compressed-tensors' targets: names, regular expressions after "re:", or a class of layers."""
    targets = keys.names(key)
    names = [target for target in targets if not target.startswith("re:")]
    patterns = [keys.pattern(key, target[3:]) for target in targets if target.startswith("re:")]
    is_named = named_by([name for name in names if name != "Linear"])
    return lambda layer: (
        "Linear" in names or is_named(layer) or any(one.match(layer) for one in patterns)
    )
