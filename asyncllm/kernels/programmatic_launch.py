"""Programmatic dependent launch for our Triton kernels: the next one starts before this one ends.

A kernel launched so (`launch_pdl=True`) runs as soon as every program of the one before it has
called `start_next` or ended, and may do what depends on no earlier kernel: compute addresses, ask
for weights. `wait_previous` then returns when the kernel before has ended and its writes are seen;
that kernel waited for its own predecessor, so all earlier ones have ended too. Hence the rules for
every kernel that is launched so: before the wait it reads only what no kernel since the last
ordinary launch has written, and writes nothing; and programs that have nothing to do wait as well,
as the next kernel's wait is for this one alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def start_next():
    """Lets the next kernel's programs start; they will wait where they need what this one makes."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_previous():
    """Zero, after the wait. Add it to the pointers that may be read and written only then: no
    compiler stage orders a load after the wait unless its address depends on it."""
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    return tl.multiple_of(zero, 16)


@triton.jit
def prefetch(ptr):
    """Ask for the lines of these addresses, which then come from L2. Writes no register, so that
    nothing before the wait waits for memory."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@cache
def launch_flags(device: torch.device) -> dict[str, Any]:
    """For the launch of a kernel whose `PDL` says whether it waits for the one before itself, as it
    can on Hopper and newer."""
    has_pdl = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if has_pdl else {"PDL": False}
