"""Our CUDA C++ as shared libraries, compiled once for a source and an architecture.

They hold neither Python nor torch, only C functions that launch on a stream, so any version of both
may load them. Kept in $XDG_CACHE_HOME/asyncllm, as Triton and FlashInfer keep theirs; without a
compiler, or a folder that may be written and loaded from, there is no library, and its user does
without: no engine fails to start for a faster kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from asyncllm.cache_folder import cache_folder

logger = logging.getLogger("asyncllm")

DEVICE_FOLDER = Path(__file__).parent / "cuda"  # of what all sources include
FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
COMPILE_SECONDS = 120
MAX_ERROR_CHARS = 2000

# (arguments, blocks, stream) -> cudaError_t
Launch = Callable[[object, int, int], int]


def load(
    source: Path, capability: tuple[int, int], definitions: Sequence[str] = ()
) -> ctypes.CDLL | None:
    """The library of `source` for a card of this compute capability; None where it cannot be made.

    `definitions`: -DNAME=VALUE, each set of them another library. Takes seconds where it is not in
    the cache; the compiler is another process.
    """
    try:
        return _load(source, capability, definitions)
    except (OSError, RuntimeError) as error:  # no home, not ours to look into, mounted noexec
        logger.warning("%s is not used, other kernels do its work: %s", source.name, error)
        return None


def begin_loading(
    source: Path, capability: tuple[int, int], definitions: Sequence[str] = ()
) -> Callable[[], ctypes.CDLL | None]:
    """`load`, by a thread from now on; to call what this returns is to wait for its result.

    Whoever asks again, in this process, waits for the same.
    """
    return _begin_loading(source, capability, tuple(definitions)).result


@cache
def _begin_loading(
    source: Path, capability: tuple[int, int], definitions: tuple[str, ...]
) -> Future[ctypes.CDLL | None]:
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-nvcc")
    loading = thread.submit(load, source, capability, definitions)
    thread.shutdown(wait=False)
    return loading


def begin_loading_launch(
    source: Path, name: str, capability: tuple[int, int], definitions: Sequence[str]
) -> Callable[[], Launch | None]:
    """`begin_loading`, of the library's function `name` alone."""
    loading = begin_loading(source, capability, definitions)

    def wait() -> Launch | None:
        library = loading()
        if library is None:
            return None
        launch = getattr(library, name)
        launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        return launch

    return wait


def path_of(source: Path, capability: tuple[int, int], definitions: Sequence[str] = ()) -> Path:
    """Where `load` keeps its library, be it there or not."""
    flags = _flags(capability, definitions)
    folders = {source.parent, DEVICE_FOLDER}
    headers = sorted({header for folder in folders for header in folder.rglob("*.cuh")})
    texts = [file.read_bytes() for file in (source, *headers)]
    key = hashlib.sha256(b"\0".join([*texts, *map(str.encode, flags)]))
    return cache_folder() / f"{source.stem}-{key.hexdigest()[:16]}.so"


def _flags(capability: tuple[int, int], definitions: Sequence[str]) -> tuple[str, ...]:
    card = f"{capability[0]}{capability[1]}a"  # a: all that it has
    return (*FLAGS, f"-gencode=arch=compute_{card},code=sm_{card}", *definitions)


def _load(
    source: Path, capability: tuple[int, int], definitions: Sequence[str]
) -> ctypes.CDLL | None:
    library = path_of(source, capability, definitions)
    if not library.exists():
        compiler = find_compiler()
        if compiler is None:
            logger.info("no nvcc: %s is not compiled, other kernels do its work", source.name)
            return None
        if not _compile(compiler, source, _flags(capability, definitions), library):
            return None
    return ctypes.CDLL(str(library))


def find_compiler() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def _compile(compiler: str, source: Path, flags: Sequence[str], library: Path) -> bool:
    """Whole or not at all: other engines may start at the same time."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [compiler, *flags, str(source), "-o", str(made)]
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS
            )
            made.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        logger.warning("%s was not compiled: %s", source.name, said[-MAX_ERROR_CHARS:])
        return False
    return True
