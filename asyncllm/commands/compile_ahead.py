"""Modules compiled by other processes while this one imports: for a start without bytecode.

Python compiles what it imports in the importing thread, a file after another: thirteen seconds of a
first start. Spare cores do it here, ahead of that thread (import_walk), which then finds
bytecode. Nothing depends on them: what they have not compiled in time, or cannot, is compiled as
ever. They end when done, and with this process. A start that finds bytecode asks for none of it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from threading import Thread

from asyncllm.cores import num_cores

SCRIPT = Path(__file__).with_name("import_walk") / "__main__.py"
SPARE_CORES = 2  # for the importing thread, and for those of CUDA and of the weights
MIN_WORKERS = 2
MAX_WORKERS = 12
PACKAGES = ("asyncllm", "asyncllm.attention", "asyncllm.graphs", "asyncllm.models")
# In the order of import. Ours are what `serve` imports, the others what libraries import by a name
# that they make up, or in functions that are called at once; what is not there is passed over.
ROOTS = (
    "huggingface_hub.hf_api",
    "asyncllm.engine.async_engine",
    "asyncllm.server.serve",
    "httpcore",
    "httpcore2",
    "cuda.pathfinder",
    "transformers.models.auto.configuration_auto",
    "transformers.tokenization_utils_tokenizers",
    "triton.language.extra.cuda",
    "triton.language.extra.hip",
    "triton.backends.nvidia.compiler",
    "triton.backends.nvidia.driver",
    "triton.backends.amd.compiler",
    "triton.backends.amd.driver",
    "triton.compiler.code_generator",
    "triton.experimental.gluon.nvidia.hopper",
    "numpy.ma",
)


def compile_ahead(unopened: Iterable[str]) -> subprocess.Popen[bytes] | None:
    """The process, if there is something to compile, somewhere to keep it and somebody to do it.

    For a process that is ours, before its large imports. unopened: packages whose own `__init__`
    it will not run.
    """
    num_workers = min(num_cores() - SPARE_CORES, MAX_WORKERS)
    if sys.platform != "linux" or sys.dont_write_bytecode or not sys.executable:
        return None
    if num_workers < MIN_WORKERS or not is_missing():
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, *_interpreter_flags(), str(SCRIPT), *_question(num_workers, unopened)],
            stdin=subprocess.PIPE,  # left open: its end is the sign to end
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is for this process, which then ends that one
        )
    except OSError:  # the imports do without
        return None
    Thread(target=_reap, args=[process], name="asyncllm-compile-ahead", daemon=True).start()
    return process


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def is_missing() -> bool:
    """Whether torch's bytecode is, or what `SCRIPT` leaves when it has compiled everything.

    False also where nobody may write it.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or torch.cached is None:
        return False
    source = SCRIPT if _is_compiled(Path(torch.origin)) else Path(torch.origin)
    return not _is_compiled(source) and _may_be_compiled(source)


def _is_compiled(source: Path) -> bool:
    """By the rule of Python's import: time and size of the source, unless it is kept by hash."""
    try:
        with open(importlib.util.cache_from_source(str(source)), "rb") as file:
            header = file.read(16)
        stat = source.stat()
    except OSError:
        return False
    flags, time, size = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
    return flags != 0 or (time, size) == (int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size)


def _may_be_compiled(source: Path) -> bool:
    """Whether what an import compiles is kept."""
    compiled = Path(importlib.util.cache_from_source(str(source)))
    nearest = next(folder for folder in compiled.parents if folder.exists())
    return os.access(nearest, os.W_OK)


def _interpreter_flags() -> list[str]:
    """Without site-packages and environment, and what decides where bytecode is, and which."""
    flags = ["-I", "-S", *["-O"] * sys.flags.optimize]
    if sys.pycache_prefix is not None:
        flags += ["-X", f"pycache_prefix={sys.pycache_prefix}"]
    return flags


def _question(num_workers: int, unopened: Iterable[str]) -> list[str]:
    """The arguments of `SCRIPT`."""
    folders = []
    for name in PACKAGES:  # an editable install finds them in a way of its own
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations is not None
        folders.append(f"{name}={spec.submodule_search_locations[0]}")
    asked = {"path": sys.path, "folder": folders, "unopened": unopened, "root": ROOTS}
    values = [f"{kind}={value}" for kind, several in asked.items() for value in several]
    return [f"workers={num_workers}", *values]
