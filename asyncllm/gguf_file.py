"""GGUF files: a parser of their header, and their conversion to a model folder.

The folder has config.json and the tokenizer, which transformers makes from the file's metadata, and
a link to the file for its weights (models/gguf_checkpoint.py). It is kept in the user's cache, by
the file's path, size and time.

The header is not trusted: each count, length and offset is compared with the file's size before it
is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from asyncllm.errors import ModelLoadError, one_line
from asyncllm.host import cache_folder

SUFFIX = ".gguf"
LINK = f"model{SUFFIX}"  # the link to the file in the folder
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_DIMS = 4
MAX_KEY_BYTES = 1 << 16
STRING, ARRAY = 8, 9
FLOAT32 = 0  # ggml's type number
ROPE_DIVISORS = "rope_freqs.weight"
LLAMA3_FACTORS = (8.0, 32.0)  # 3.1 and 3.3, 3.2
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Value type -> its letter for `struct`.
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
LEAST_BYTES_OF_KEY = 12  # a length and a type
LEAST_BYTES_OF_TENSOR = 24


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """shape: in torch's order, the last dimension contiguous. start: byte offset in the file."""

    shape: tuple[int, ...]
    type: int  # ggml's type number
    start: int


class GGUFHeader:
    """Metadata and tensors of a file. Raises `ModelLoadError` for an invalid header."""

    @property
    def architecture(self) -> str:
        """Raises `ModelLoadError` for an unsupported architecture."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ModelLoadError(
                f"{self._file}: general.architecture {name!r} is not served, only "
                f"{', '.join(ARCHITECTURES)}"
            )
        return name

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            with file.open("rb") as opened:
                self._size = os.fstat(opened.fileno()).st_size
                self._read(opened)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{file}: {one_line(error)}") from error

    def _read(self, opened: BinaryIO) -> None:
        if opened.read(4) != MAGIC:
            raise ValueError("is no GGUF file")
        version, num_tensors, num_keys = self._unpack(opened, "IQQ")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is none of {VERSIONS}")
        self._check_count("tensors", num_tensors, LEAST_BYTES_OF_TENSOR)
        self._check_count("keys", num_keys, LEAST_BYTES_OF_KEY)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string(opened, MAX_KEY_BYTES)
            self.metadata[key] = self._value(opened, *self._unpack(opened, "I"))
        found = [self._tensor(opened) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ValueError(f"general.alignment {alignment!r} is no alignment")
        first = -(-opened.tell() // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in found:
            if name in self.tensors:
                raise ValueError(f"tensor {name} is there twice")
            if offset % alignment or first + offset > self._size:
                raise ValueError(f"tensor {name}: offset {offset} is not in the file")
            self.tensors[name] = GGUFTensor(shape, kind, first + offset)

    def _tensor(self, opened: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(opened, MAX_KEY_BYTES)
        (num_dims,) = self._unpack(opened, "I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise ValueError(f"tensor {name}: {num_dims} dimensions")
        sizes = self._unpack(opened, f"{num_dims}Q")
        if any(not 0 < size <= 8 * self._size for size in sizes):
            raise ValueError(f"tensor {name}: shape {sizes} is larger than the file")
        kind, offset = self._unpack(opened, "IQ")
        return name, tuple(reversed(sizes)), kind, offset

    def _value(self, opened: BinaryIO, kind: int) -> Any:
        if kind == STRING:
            return self._string(opened, self._size)
        if kind != ARRAY:
            if kind not in SCALARS:
                raise ValueError(f"value type {kind} is unknown")
            return self._unpack(opened, SCALARS[kind])[0]
        kind, count = self._unpack(opened, "IQ")
        if kind == STRING:
            self._check_count("strings", count, 8)
            return [self._string(opened, self._size) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"an array of value type {kind} is not known")
        self._check_count("values", count, struct.calcsize(SCALARS[kind]))
        return list(self._unpack(opened, f"{count}{SCALARS[kind]}"))

    def _string(self, opened: BinaryIO, most: int) -> str:
        (length,) = self._unpack(opened, "Q")
        if length > most or length > self._size - opened.tell():
            raise ValueError(f"a string of {length} bytes is longer than the file")
        return opened.read(length).decode()

    def _unpack(self, opened: BinaryIO, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        content = opened.read(struct.calcsize(layout))
        if len(content) < struct.calcsize(layout):
            raise ValueError("ends within its header")
        return struct.unpack(layout, content)

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        if count > self._size // least_bytes:
            raise ValueError(f"{count} {what} are more than the file can hold")


def unpack_gguf(file: Path) -> Path:
    """The model folder of a GGUF file, absolute. Raises `ModelLoadError`."""
    file = file.resolve()
    _ = GGUFHeader(file).architecture  # before a library reads it
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f"{file}: needs the package gguf: pip install 'asyncllm[gguf]'")
    stat = file.stat()
    key = hashlib.sha256(f"{file}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()
    folder = cache_folder() / "gguf" / key
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _fill(made, file)
        made.rename(folder)
    except Exception as error:  # the library's errors have no common base
        if not folder.is_dir():  # else another process has made it
            raise ModelLoadError(f"{file}: {one_line(error)}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _fill(folder: Path, file: Path) -> None:
    # A slow import.
    from transformers import AutoConfig, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(file.parent, trust_remote_code=False, **options)
    content = config.to_dict()
    header = GGUFHeader(file)
    content["architectures"] = [ARCHITECTURES[header.architecture]]
    if (divisors := header.tensors.get(ROPE_DIVISORS)) is not None:
        content["rope_parameters"] |= _llama3_scaling(file, divisors, content)
    content["tie_word_embeddings"] = "output.weight" not in header.tensors
    (folder / "config.json").write_text(json.dumps(content, default=str))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **options)
    tokenizer.save_pretrained(folder)
    (folder / LINK).symlink_to(file)


def _llama3_scaling(file: Path, stored: GGUFTensor, content: dict[str, Any]) -> dict[str, Any]:
    """The RoPE parameters of Llama 3.1 or 3.2. The file only has the divisors of the frequencies.
    Raises `ModelLoadError` for unknown divisors."""
    head_dim = content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]
    theta = content["rope_parameters"]["rope_theta"]
    with file.open("rb") as opened:
        opened.seek(stored.start)
        bytes_ = opened.read(4 * (head_dim // 2))
    if stored.type == FLOAT32 and stored.shape == (head_dim // 2,) and len(bytes_) == 2 * head_dim:
        divisors = struct.unpack(f"<{head_dim // 2}f", bytes_)
        for factor in LLAMA3_FACTORS:
            expected = [
                _llama3_divisor(2 * i / head_dim, theta, factor) for i in range(head_dim // 2)
            ]
            if all(
                math.isclose(*pair, rel_tol=1e-3) for pair in zip(divisors, expected, strict=True)
            ):
                return LLAMA3 | {"rope_type": "llama3", "factor": factor}
    raise ModelLoadError(f"{file}: {ROPE_DIVISORS} is not that of Llama 3.1 or 3.2")


def _llama3_divisor(exponent: float, theta: float, factor: float) -> float:
    """1 for short wavelengths, `factor` for long ones, with a smooth transition."""
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta**exponent)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / ((1 - smooth) / factor + smooth)
