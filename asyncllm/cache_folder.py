"""The folder in which a start keeps compiled kernels and GEMM choices for the next one."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/asyncllm. Raises `RuntimeError` where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "asyncllm"
