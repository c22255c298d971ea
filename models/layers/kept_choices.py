"""Which algorithm each product is to be run by, kept on disk between starts.

One file per card, library and type of numbers, for all models: a product is its three sizes. A file
that cannot be read or written is a start that measures again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

from asyncllm.cache_folder import cache_folder
from asyncllm.models.layers.cublas_lt import Shape

logger = logging.getLogger("asyncllm")

Choices = dict[Shape, bytes | None]  # None: torch's own


class KeptChoices:
    """`key`: of what makes a measurement worth nothing elsewhere."""

    def __init__(self, *key: object) -> None:
        digest = hashlib.sha256(json.dumps([str(part) for part in key]).encode()).hexdigest()
        self._name = f"products-{digest[:16]}.json"

    def load(self) -> Choices:
        """Empty where there is nothing that can be read."""
        try:
            entries = json.loads(self._path.read_bytes())
            return {
                Shape(*map(int, shape.split())): None
                if algorithm is None
                else bytes.fromhex(algorithm)
                for shape, algorithm in entries.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.info("choices of products are measured again: %s", error)
            return {}

    def save(self, choices: Choices) -> None:
        """Beside what others have kept meanwhile. Whole or not at all."""
        entries = {
            " ".join(map(str, shape)): None if algorithm is None else algorithm.hex()
            for shape, algorithm in {**self.load(), **choices}.items()
        }
        try:
            path = self._path
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder) / path.name
                made.write_text(json.dumps(entries))
                os.replace(made, path)
        except (OSError, RuntimeError) as error:  # a read-only folder, no home
            logger.info("choices of products are not kept: %s", error)

    @property
    def _path(self) -> Path:
        return cache_folder() / self._name
