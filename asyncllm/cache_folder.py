"""Where a start leaves what the next one need not make again: compiled kernels, bytecode."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/asyncllm. Raises `RuntimeError` where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "asyncllm"
