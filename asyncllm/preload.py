"""Slow imports begun at once, in a thread, while the main thread reads flags and files.

torch, the CUDA context and FlashInfer take most of a start and wait for a disk and a driver, often
without the GIL. What fails here fails again, with its message, where it is really needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LIBRARY_FOLDERS = {"torch": "lib/*.so*", "nvidia": "*/lib/*.so*", "triton": "_C/*.so*"}
# Of the CUDA libraries those that a start maps to a large part.
READ_AHEAD_NAMES = (
    "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so", "libtriton.so", "libcublasLt.so",
    "libnvrtc.so", "libnvJitLink.so", "libcusparseLt.so",
)  # fmt: skip


def preload(cuda: bool) -> None:
    """Start, and return at once. `cuda`: whether the flags allow a CUDA device."""
    threading.Thread(target=_read_ahead, name="asyncllm-read-ahead", daemon=True).start()
    if cuda:
        threading.Thread(target=_import_cuda, name="asyncllm-preload", daemon=True).start()


def _import_cuda() -> None:
    with suppress(Exception):
        import torch

        if torch.cuda.is_available():
            torch.cuda.init()
            torch.cuda.synchronize()  # makes the context
            if importlib.util.find_spec("flashinfer") is not None:
                importlib.import_module("asyncllm.attention.flashinfer")


def _read_ahead() -> None:
    """Ask the kernel for the large libraries before the linker faults them in piece by piece."""
    for file in large_libraries():
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


def large_libraries() -> Iterator[Path]:
    """Found by name in the packages' folders; nothing is imported."""
    for package, pattern in LIBRARY_FOLDERS.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted(Path(folder).glob(pattern)):
                if file.name.startswith(READ_AHEAD_NAMES):
                    yield file
