"""The folder in which a start keeps compiled kernels and GEMM choices for the next one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/asyncllm. Raises `RuntimeError` where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "asyncllm"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields where to write what `path` then becomes: whole, or not at all where this raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        yield made
        made.replace(path)
