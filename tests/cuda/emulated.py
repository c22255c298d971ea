"""Our CUDA sources as libraries for the CPU, by emulator.h."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EMULATOR = Path(__file__).with_name("emulator.h")
# -O2 compiles longer than it runs shorter. glibc's checks take jumps between stacks for errors.
FLAGS = ("-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC")
WARNINGS = ("-Wall", "-Werror", "-Wno-unknown-pragmas")


def compile_for_cpu(source: Path, function: str, definitions: Sequence[str], made: Path) -> Any:
    """`function` of `source`, which takes its arguments, a number of blocks, and for a stream the
    seed of the order in which threads take turns."""
    command = ["g++", *FLAGS, *WARNINGS, "-include", str(EMULATOR), "-x", "c++"]
    subprocess.run([*command, str(source), *definitions, "-o", str(made)], check=True)
    compiled = getattr(ctypes.CDLL(str(made)), function)
    compiled.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return compiled
