"""Our CUDA C++ as shared libraries, compiled once for a source and an architecture.

They hold neither Python nor torch, only C functions that launch on a stream, so any version of both
may load them. Kept in $XDG_CACHE_HOME/asyncllm, as Triton and FlashInfer keep theirs; without a
compiler, or a folder that may be written and loaded from, there is no library, and its user falls
back: no engine fails to start for a faster kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from asyncllm.host import cache_folder, replaced

logger = logging.getLogger("asyncllm")

INCLUDE_FOLDER = Path(__file__).parent / "include"  # headers of all sources
FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
COMPILE_SECONDS = 120
MAX_ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Library:
    """A source compiled for GPUs of one compute capability.

    `definitions`: -DNAME=VALUE, each set of them another library. `fallback`: what is said to run
    where it cannot be made.
    """

    source: Path
    capability: tuple[int, int]
    definitions: tuple[str, ...] = ()
    fallback: str = field(default="other kernels", compare=False)

    @property
    def path(self) -> Path:
        """Where it is kept, be it there or not."""
        folders = (self.source.parent, INCLUDE_FOLDER)
        headers = sorted({header for folder in folders for header in folder.rglob("*.cuh")})
        texts = [file.read_bytes() for file in (self.source, *headers)]
        key = hashlib.sha256(b"\0".join([*texts, *map(str.encode, self._flags)]))
        return cache_folder() / f"{self.source.stem}-{key.hexdigest()[:16]}.so"

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_built(self) -> bool:
        """False also where our cache is not to be looked into: nothing can be loaded from there."""
        try:
            return self.path.exists()
        except (OSError, RuntimeError):  # not ours to look into, no home
            return False

    def build(self) -> Library:
        """Compile it; what the compiler has against it is a warning."""
        self.load()
        return self

    def begin_loading(self) -> Callable[[], ctypes.CDLL | None]:
        """`load`, by a thread from now on; to call what this returns is to wait for its result.

        Whoever asks again, in this process, waits for the same.
        """
        return _begin_loading(self).result

    def load(self) -> ctypes.CDLL | None:
        """None where it cannot be made. Takes seconds where it is not in the cache; the compiler is
        another process."""
        try:
            path = self.path
            if not path.exists() and not self._compile(path):
                return None
            return ctypes.CDLL(str(path))
        except (OSError, RuntimeError) as error:  # no home, not ours to look into, mounted noexec
            self._log_fallback(logging.WARNING, str(error))
            return None

    @property
    def _flags(self) -> tuple[str, ...]:
        gpu = f"{self.capability[0]}{self.capability[1]}a"  # a: all that it has
        return (*FLAGS, f"-gencode=arch=compute_{gpu},code=sm_{gpu}", *self.definitions)

    def _compile(self, path: Path) -> bool:
        """Whole or not at all: other engines may start at the same time."""
        compiler = find_compiler()
        if compiler is None:
            self._log_fallback(logging.INFO, "no nvcc")
            return False
        try:
            with replaced(path) as made:
                command = [compiler, *self._flags, str(self.source), "-o", str(made)]
                subprocess.run(
                    command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS
                )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            self._log_fallback(logging.WARNING, said[-MAX_ERROR_CHARS:])
            return False
        return True

    def _log_fallback(self, level: int, reason: str) -> None:
        logger.log(level, "%s: falling back to %s: %s", self.source.name, self.fallback, reason)


@cache
def _begin_loading(library: Library) -> Future[ctypes.CDLL | None]:
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-nvcc")
    loading = thread.submit(library.load)
    thread.shutdown(wait=False)
    return loading


def find_compiler() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))
