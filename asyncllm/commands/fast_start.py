"""Prepares the start of an engine before torch is imported, for `serve` and `bench startup`.

Packages become lazy (lazy_packages.py), and a thread makes CUDA's context during the imports: a
third of a second of the driver's time and none of Python's. A process has one primary context per
device, which torch then finds. Only the driver's C interface can make it before torch is there; if
a call of it fails, torch meets the same error later and reports it. Then Triton hashes itself.
"""

from __future__ import annotations

import ctypes
import os
from threading import Thread

from asyncllm.commands.lazy_packages import make_lazy
from asyncllm.kernels.triton_key import hash_compiler

# Package -> its distribution, and names that its own modules import from it (transformers 5.17's
# do).
LAZY_PACKAGES: dict[str, tuple[str, dict[str, str]]] = {
    "transformers": ("transformers", {"AddedToken": "tokenization_utils_base"}),
    "transformers.models": ("transformers", {}),
    "flashinfer": ("flashinfer-python", {}),
}


def begin_fast_start(device: str) -> Thread | None:
    """Returns the thread that makes the CUDA context, None for `--device cpu`.

    Changes how this process imports: only for a process that is ours, not for an application.
    """
    for package, (distribution, known) in LAZY_PACKAGES.items():
        make_lazy(package, distribution, known)
    # Triton's own search for backends reads what every installed distribution declares.
    os.environ.setdefault("TRITON_BACKENDS_IN_TREE", "1")
    if device == "cpu":
        return None
    # No daemon: an exit must wait for it, because it would end the driver while that initialises.
    thread = Thread(target=_make_context, name="asyncllm-cuda-context")
    thread.start()
    return thread


def _make_context() -> None:
    """On the first device. Does nothing without a driver or a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        Thread(target=hash_compiler, name="asyncllm-triton-key", daemon=True).start()
