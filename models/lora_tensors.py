"""The tensors of an adapter's file, each checked as it is read.

They are read and not mapped: to unmap a file holds the GIL, some 2 ms for 84 MB, and a mapped file
that somebody shortens ends the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from asyncllm.errors import LoRALoadError
from asyncllm.models.checkpoint import read_offsets
from asyncllm.models.layers.lora_places import WeightPart

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_ROWS = 4096  # of a whole weight at a time: a vocabulary's is a gigabyte


class AdapterTensors:
    """opened: the file by safetensors, which has checked its header. content: its bytes."""

    def __init__(self, file: Path, opened: Any, content: BufferedReader) -> None:
        self._file, self._opened, self._content = file, opened, content
        self._offsets = read_offsets(file)

    def __iter__(self) -> Iterator[str]:
        yield from self._opened.keys()

    def read(self, name: str, wanted: list[int] | None = None) -> torch.Tensor:
        """In float32. wanted: the shape."""
        dtype, shape = self._header(name)
        tensor = self._read(name, dtype, shape)
        if wanted is not None:
            self.check(name, shape, wanted)
        return tensor.float()

    def pieces(
        self, name: str, part: WeightPart
    ) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor]]:
        """(rows of the part, what they are in the file), as the file has them."""
        dtype, shape = self._header(name)
        self.check(name, shape, [*part.shape])
        for start in range(0, shape[0], PIECE_ROWS):
            rows = min(PIECE_ROWS, shape[0] - start)
            piece = self._read(name, dtype, [rows, shape[1]], start * shape[1])
            if part.rows is None:
                yield slice(start, start + len(piece)), piece[:, part.columns]
            else:
                own = (part.rows >= start) & (part.rows < start + len(piece))
                yield own.nonzero().squeeze(1), piece[part.rows[own] - start][:, part.columns]

    def _header(self, name: str) -> tuple[torch.dtype, list[int]]:
        """Dtype and shape."""
        given = self._opened.get_slice(name)
        if (dtype := given.get_dtype()) not in DTYPES:
            raise self.error(f"{name} has dtype {dtype}")
        return DTYPES[dtype], given.get_shape()

    def _read(
        self, name: str, dtype: torch.dtype, shape: list[int], first: int = 0
    ) -> torch.Tensor:
        """As many elements of a tensor, from element `first` on. They are finite."""
        tensor = torch.empty(shape, dtype=dtype)
        self._content.seek(self._offsets[name] + first * dtype.itemsize)
        memory: Any = tensor.view(-1).view(torch.uint8).numpy()
        if self._content.readinto(memory) < tensor.nbytes:
            raise self.error(f"ends within {name}")
        # NaN is both least and greatest. In a tenth of the time of `isfinite` of all elements.
        if tensor.numel() and not all(math.isfinite(each.item()) for each in tensor.aminmax()):
            raise self.error(f"{name} holds NaN or infinity")
        return tensor

    def check(self, name: str, shape: Any, wanted: list[int]) -> None:
        if list(shape) != wanted:
            raise self.error(f"{name} has shape {list(shape)}, the model needs {wanted}")

    def error(self, what: str) -> LoRALoadError:
        return LoRALoadError(f"{self._file}: {what}")
