"""The lists by which FA3's prefill kernel works, as prefill_lists.cu makes them on the host.

FlashInfer's planner keeps vectors for each block and list; this makes the same lists, word by word,
as FlashInfer 0.6.12 has them. attention/prefill_lists.py names them and keeps their memory.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from asyncllm.kernels import balanced_decode
from asyncllm.kernels.declaration import CudaKernel, Definitions, Start

_pointer, _int32 = ctypes.c_void_p, ctypes.c_int32


class Args(ctypes.Structure):
    """The function's, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("host", "device")),
        *((name, _int32) for name in ("pitch", "heads", "tile", "blocks", "num_decodes")),
    )


def _definitions_for(start: Start) -> Definitions | None:
    """With balanced_decode for the decodes of the same steps."""
    uses_decode = balanced_decode.KERNEL.definitions_for(start) is not None
    return () if uses_decode and start.captures_prefills else None


KERNEL = CudaKernel(
    name="prefill_lists",
    falls_back_to="graphs of pieces between attention",
    source=Path(__file__).with_name("prefill_lists.cu"),
    structs=(Args,),
    capabilities=((9, 0),),  # whose prefills FA3 does
    definitions_for=_definitions_for,
)
