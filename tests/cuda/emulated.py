"""Our CUDA sources as libraries for the CPU, by emulator.h."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

from asyncllm.kernels.declaration import CudaKernel, Launch

EMULATOR = Path(__file__).with_name("emulator.h")
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas")


def compile_for_cpu(
    kernel: CudaKernel, definitions: Sequence[str], made: Path, source: Path | None = None
) -> Launch:
    """The kernel's function, which takes its arguments, a number of blocks, and for a stream the
    seed of the order in which threads run. `source`: another than the kernel's own."""
    command = ["g++", *FLAGS, "-include", str(EMULATOR), "-x", "c++", str(source or kernel.source)]
    subprocess.run([*command, *definitions, "-o", str(made)], check=True)
    return kernel.function_of(ctypes.CDLL(str(made)))
