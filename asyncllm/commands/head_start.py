"""What a command that starts an engine does before torch is imported, in a process that is ours.

Later imports become cheaper: bytecode is kept, other processes make what of it is missing, some
packages are left unopened. And CUDA's context, a third of a second of the driver's time and none of
Python's, is made by a thread meanwhile. A process has one such context for a device, which torch
then finds. It is asked for through the driver's C interface, the only one there is by then; what
goes wrong in it torch meets again, and says. Where there is a device, Triton hashes itself too.
"""

from __future__ import annotations

import ctypes
import os
from threading import Thread

from asyncllm.commands.bytecode import keep_bytecode
from asyncllm.commands.compile_ahead import compile_ahead
from asyncllm.commands.spared import COMMAND_LINE, spare_libraries
from asyncllm.commands.unopened import leave_unopened
from asyncllm.kernels.triton_key import hash_compiler

# Packages -> where they were installed from, and names that their own modules ask them for
# (transformers 5.17's do).
UNOPENED: dict[str, tuple[str, dict[str, str]]] = {
    "transformers": ("transformers", {"AddedToken": "tokenization_utils_base"}),
    "transformers.models": ("transformers", {}),
    "flashinfer": ("flashinfer-python", {}),
}


def take_head_start(device: str) -> Thread | None:
    """`device`: as the flag has it. Returns the thread that makes the context, where one may be."""
    keep_bytecode()
    compiling = compile_ahead([*UNOPENED, COMMAND_LINE]) is not None
    spare_libraries()
    for package, (distribution, known) in UNOPENED.items():
        leave_unopened(package, distribution, known)
    # Triton's own search for backends reads what every installed distribution declares.
    os.environ.setdefault("TRITON_BACKENDS_IN_TREE", "1")
    if device == "cpu":
        return None
    # No daemon: who exits waits for it, rather than to end the driver while it begins.
    thread = Thread(target=_make_context, args=[not compiling], name="asyncllm-cuda-context")
    thread.start()
    return thread


def _make_context(hashes: bool) -> None:
    """On the first device. Without a driver or a device nothing happens.

    hashes: Triton after it. Not where its bytecode is missing, which other processes then compile.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        if hashes:
            Thread(target=hash_compiler, name="asyncllm-triton-key", daemon=True).start()
