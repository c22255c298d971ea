"""Python's own cache: modules whose bytecode no install and no earlier run has left.

Where there is none (PYTHONDONTWRITEBYTECODE at image build, a read-only environment), each start
compiles two thousand modules of torch, transformers and FlashInfer again: half of its time. So a
command of ours keeps bytecode where it keeps its kernels, and `kernels build` writes it to where
every process finds it.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import sys
from pathlib import Path

from asyncllm.cache_folder import cache_folder

# On the disk: several times a start's bytecode. On a full one Python before 3.12.8 leaves files
# that were cut, and every later start fails at them.
LEAST_FREE_BYTES = 256 << 20


def keep_bytecode() -> None:
    """Let this process keep bytecode in our cache, where torch's is missing and nobody writes it.

    For a process that is ours, before its large imports. Python checks each file's time and size.
    Whoever has named a folder (PYTHONPYCACHEPREFIX) keeps it. On a full disk what is there is used.
    """
    if sys.pycache_prefix is not None:
        return
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or torch.cached is None or Path(torch.cached).exists():
        return
    if not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK):
        return  # beside its source: this start writes it there
    try:
        folder = cache_folder() / "bytecode"
        folder.mkdir(parents=True, exist_ok=True)
        has_room, is_empty = _free_bytes(folder) >= LEAST_FREE_BYTES, not any(folder.iterdir())
    except (OSError, RuntimeError):  # then what bytecode there is must go on being found
        return
    if os.access(folder, os.W_OK) and (has_room or not is_empty):
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), not has_room


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


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
