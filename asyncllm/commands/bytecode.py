"""Python's own cache: modules whose bytecode no install and no earlier run has left.

Where there is none (PYTHONDONTWRITEBYTECODE at image build, a read-only environment), each start
compiles two thousand modules of torch, transformers and FlashInfer again: half of its time.
"""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path


def modules_without_bytecode() -> list[tuple[Path, Path]]:
    """(source, where its bytecode belongs) of what this process has imported."""
    found = []
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.cached is None or not str(spec.origin).endswith(".py"):
            continue
        if not Path(spec.cached).exists():
            found.append((Path(spec.origin), Path(spec.cached)))
    return found


def write_bytecode() -> tuple[int, int]:
    """Compile those; returns how many were written and how many could not be."""
    written = failed = 0
    for source, target in modules_without_bytecode():
        try:
            py_compile.compile(str(source), cfile=str(target), doraise=True)
            written += 1
        except (OSError, py_compile.PyCompileError):  # read-only, or a file that is no module
            failed += 1
    return written, failed
