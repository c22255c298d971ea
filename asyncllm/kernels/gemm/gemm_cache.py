"""Which algorithm each GEMM is to be run by, kept on disk between starts.

One file per GPU, library and type of numbers, for all models: a GEMM is its three sizes. A file
that cannot be read or written, or holds anything else, is a start that measures again. What the
bytes of an algorithm mean only the library knows, which is asked before they are used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from asyncllm.host import cache_folder, replaced
from asyncllm.kernels.gemm.cublas_lt import ALGORITHM_BYTES, Shape

logger = logging.getLogger("asyncllm")

MOST_BYTES = 4 << 20  # of the file: a model has some hundred GEMMs of 150 bytes

Choices = dict[Shape, bytes | None]  # None: torch's own


class GemmCache:
    """`key`: of what makes a measurement worth nothing elsewhere."""

    def __init__(self, *key: object) -> None:
        digest = hashlib.sha256(json.dumps([str(part) for part in key]).encode()).hexdigest()
        self._name = f"gemm-{digest[:16]}.json"

    def load(self) -> Choices:
        """Empty where there is nothing that can be read."""
        try:
            with self._path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise ValueError(f"{self._path} has more than {MOST_BYTES} bytes")
            return dict(_choice(*entry) for entry in json.loads(text).items())
        except FileNotFoundError:
            return {}
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.info("GEMMs are measured again: %s", error)
            return {}

    def save(self, choices: Choices) -> None:
        """Beside what others have kept meanwhile. Whole or not at all."""
        entries = {
            " ".join(map(str, shape)): None if algorithm is None else algorithm.hex()
            for shape, algorithm in {**self.load(), **choices}.items()
        }
        try:
            with replaced(self._path) as made:
                made.write_text(json.dumps(entries))
        except (OSError, RuntimeError) as error:  # a read-only folder, no home
            logger.info("choices of GEMM algorithms are not kept: %s", error)

    @property
    def _path(self) -> Path:
        return cache_folder() / self._name


def _choice(shape: str, algorithm: str | None) -> tuple[Shape, bytes | None]:
    """As an entry of the file has it. Raises `ValueError` or `TypeError` for what is none."""
    sizes = Shape(*map(int, shape.split()))
    chosen = None if algorithm is None else bytes.fromhex(algorithm)
    if min(sizes) < 1 or (chosen is not None and len(chosen) != ALGORITHM_BYTES):
        raise ValueError(f"{shape!r} is no GEMM, or its algorithm none")
    return sizes, chosen
