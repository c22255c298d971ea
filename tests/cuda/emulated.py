"""Our CUDA sources as libraries for the CPU, by emulator.h."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

from asyncllm.kernels.declaration import CudaKernel, Launch

EMULATOR = Path(__file__).with_name("emulator.h")
# -O2 compiles longer than it runs shorter. glibc's checks take jumps between stacks for errors.
FLAGS = ("-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC")
WARNINGS = ("-Wall", "-Werror", "-Wno-unknown-pragmas")


def compile_for_cpu(
    kernel: CudaKernel, definitions: Sequence[str], made: Path, source: Path | None = None
) -> Launch:
    """The kernel's function, which takes its arguments, a number of blocks, and for a stream the
    seed of the order in which threads run. `source`: another than the kernel's own."""
    command = ["g++", *FLAGS, *WARNINGS, "-include", str(EMULATOR), "-x", "c++"]
    command += [str(source or kernel.source), *definitions, "-o", str(made)]
    subprocess.run(command, check=True)
    return load_for_cpu(kernel, made)


def load_for_cpu(kernel: CudaKernel, made: Path) -> Launch:
    return kernel.function_of(ctypes.CDLL(str(made)))
