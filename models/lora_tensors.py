"""The tensors of an adapter's file, each checked as it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from asyncllm.errors import LoRALoadError
from asyncllm.models.layers.lora_places import WeightPart

DTYPES = ("F32", "F16", "BF16")
PIECE_ROWS = 4096  # of a whole weight at a time: a vocabulary's is a gigabyte


class AdapterTensors:
    """opened: by safetensors, for torch on the CPU."""

    def __init__(self, file: Path, opened: Any) -> None:
        self._file, self._opened = file, opened

    def __iter__(self) -> Iterator[str]:
        yield from self._opened.keys()

    def read(self, name: str, wanted: list[int] | None = None) -> torch.Tensor:
        """In float32. wanted: the shape."""
        self._slice(name)
        tensor = self._finite(name, self._opened.get_tensor(name))
        if wanted is not None:
            self.check(name, tensor.shape, wanted)
        return tensor.float()

    def pieces(
        self, name: str, part: WeightPart
    ) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor]]:
        """(rows of the part, what they are in the file), as the file has them."""
        given = self._slice(name)
        self.check(name, given.get_shape(), [*part.shape])
        for start in range(0, part.shape[0], PIECE_ROWS):
            piece = self._finite(name, given[start : start + PIECE_ROWS])
            if part.rows is None:
                yield slice(start, start + len(piece)), piece[:, part.columns]
            else:
                own = (part.rows >= start) & (part.rows < start + len(piece))
                yield own.nonzero().squeeze(1), piece[part.rows[own] - start][:, part.columns]

    def _slice(self, name: str) -> Any:
        given = self._opened.get_slice(name)
        if (dtype := given.get_dtype()) not in DTYPES:
            raise self.error(f"{name} has dtype {dtype}")
        return given

    def _finite(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.isfinite().all():
            raise self.error(f"{name} holds NaN or infinity")
        return tensor

    def check(self, name: str, shape: Any, wanted: list[int]) -> None:
        if list(shape) != wanted:
            raise self.error(f"{name} has shape {list(shape)}, the model needs {wanted}")

    def error(self, what: str) -> LoRALoadError:
        return LoRALoadError(f"{self._file}: {what}")
