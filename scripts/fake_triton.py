"""Triton's driver without a GPU: kernels are compiled for sm_90, and launches are recorded.

A request waits for a variant that is compiled only when requests are served.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import traceback
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CAPABILITY = (9, 0)
SHARED_BYTES = 232_448  # of a block
MAX_THREADS = 1024  # of a block
MAX_GRID = (2**31 - 1, 65_535, 65_535)
NUM_PLACES = 4  # recorded stack frames
STEPS = "steps"  # the phase in which requests are served


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled variant of a kernel. The numbers are 0 if it was not compiled."""

    name: str
    constants: str
    regs: int = 0
    spills: int = 0
    shared: int = 0
    num_warps: int = 0


@dataclass
class Seen:
    """A record of what happens on the fake device, and in which phase."""

    phase: str = "start"
    variants: dict[int, Variant] = field(default_factory=dict)  # by handle
    first: dict[int, str] = field(default_factory=dict)  # handle -> its first launch's phase
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)  # phase, name
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # phase, what and where
    errors: list[str] = field(default_factory=list)
    is_capturing: bool = False

    def wait(self, what: object) -> None:
        """Record that the host waits for the device, here."""
        phase = "capture" if self.is_capturing else self.phase
        self.waits[phase, f"{what} at {place()}"] += 1

    def problems(self) -> list[str]:
        """A line for everything that should not have happened."""
        found = list(dict.fromkeys(self.errors))
        for handle, variant in self.variants.items():
            if variant.spills:
                found.append(f"{variant.name} spills {variant.spills} bytes: {variant.constants}")
            if self.first.get(handle) == STEPS:
                found.append(f"a request waits for {variant.name}: {variant.constants}")
        for (phase, what), count in self.waits.items():
            if phase != "start":
                found.append(f"the host waits in {phase}, {count} times: {what}")
        return found


def place() -> str:
    """The innermost stack frames outside installed packages, innermost first."""
    ours = [
        f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if "site-packages" not in frame.filename and "fake_" not in frame.filename
    ]
    return " < ".join(reversed(ours[-NUM_PLACES:]))


class Launcher:
    """Replaces Triton's launcher: checks the grid and the arguments."""

    def __init__(self, seen: Seen, name: str) -> None:
        self._seen, self._name = seen, name

    def __call__(self, x: int, y: int, z: int, stream: Any, handle: int, *args: Any) -> None:
        seen = self._seen
        seen.launches[seen.phase, self._name] += 1
        seen.first.setdefault(handle, seen.phase)
        if any(size > most for size, most in zip((x, y, z), MAX_GRID, strict=True)):
            seen.errors.append(f"{self._name}: grid {(x, y, z)} at {place()}")
        if any(isinstance(arg, torch.Tensor) and not arg.is_cuda for arg in args):
            seen.errors.append(f"{self._name}: a tensor on the CPU at {place()}")


class Driver:
    """The part of Triton's driver that compiling and launching use."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._target = GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)
        self.launcher_cls = self._launcher
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES}
        )
        self._next: Any = None  # source and metadata of the kernel to be loaded next

    def _launcher(self, source: Any, metadata: Any) -> Launcher:
        self._next = source, metadata
        return Launcher(self._seen, metadata.name)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        source, metadata = self._next
        regs, spills = usage(binary)
        handle = len(self._seen.variants) + 1
        names = source.fn.arg_names
        constants = {names[at[0]]: value for at, value in source.constants.items()}
        types = ",".join(str(each) for each in source.signature.values() if each != "constexpr")
        words = f"{types} {constants}"
        found = Variant(name, words, regs, spills, shared, metadata.num_warps)
        self._seen.variants[handle] = found
        return object(), handle, regs, spills, MAX_THREADS


def usage(binary: bytes) -> tuple[int, int]:
    """Registers and bytes of spills per thread, by the disassembler in Triton's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout + said.stderr))
    return int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"])


class _Uncompiled:
    """Replaces a compiled kernel if nothing is compiled: only its variant is recorded."""

    packed_metadata = None

    def __init__(self, seen: Seen, name: str, key: str) -> None:
        self.function = len(seen.variants) + 1
        seen.variants[self.function] = Variant(name, key)
        self.run = Launcher(seen, name)

    def launch_metadata(self, *_: Any) -> None:
        """Only profilers' hooks read it."""


def compiling(seen: Seen, *, compiles: bool) -> list[AbstractContextManager[Any]]:
    """Patches that redirect launches to the fake device. compiles: False only records variants."""
    patches: list[AbstractContextManager[Any]] = [
        mock.patch.object(driver, "_active", Driver(seen))
    ]

    def note(self: Any, key: str, signature: Any, device: Any, *_: Any, **__: Any) -> Any:
        made = self.device_caches[device][0][key] = _Uncompiled(seen, self.fn.__name__, key)
        return made

    if not compiles:
        patches.append(mock.patch.object(JITFunction, "_do_compile", note))
    return patches
