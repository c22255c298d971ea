"""Memory of each rank's GPU that the ranks of one host address, by CUDA's IPC handles.

The driver's C interface, because torch's symmetric memory asks for ranks that number their devices
alike, and here each rank's device is the first that it sees. NVLink multicast plays no part.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

Exchange = Callable[[bytes], list[bytes]]  # every rank's bytes, in the order of the ranks


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class PeerMemory:
    """`num_bytes` on each rank, all bits one. `addresses` are theirs, as this rank sees them.

    All ranks construct it together. Raises `OSError` on all of them, with one rank's reason, where
    a rank cannot address another's. It is given back when this object is gone.
    """

    def __init__(self, rank: int, num_bytes: int, device: torch.device, exchange: Exchange) -> None:
        torch.cuda.synchronize(device)  # the device's context is this thread's from here on
        own, handle, opened = ctypes.c_uint64(), _Handle(), list[ctypes.c_uint64]()
        weakref.finalize(self, _free, torch.cuda.current_device(), own, opened)
        failure = ""
        try:
            _call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(num_bytes))
            _call("cuMemsetD8_v2", own, ctypes.c_ubyte(0xFF), ctypes.c_size_t(num_bytes))
            _call("cuIpcGetMemHandle", ctypes.byref(handle), own)
        except OSError as error:
            failure = f"rank {rank}: {error}"
        torch.cuda.synchronize(device)  # it is filled before another rank hears of it
        handles = exchange(bytes(handle))
        self.addresses = [own.value] * len(handles)
        for peer, theirs in enumerate(handles):
            if peer == rank or failure:
                continue
            address = ctypes.c_uint64()
            try:
                of_peer = _Handle.from_buffer_copy(theirs)
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), of_peer, LAZY_PEER_ACCESS)
            except OSError as error:
                failure = f"rank {rank}, memory of rank {peer}: {error}"
                continue
            opened.append(address)
            self.addresses[peer] = address.value
        failures = [each.decode() for each in exchange(failure.encode()) if each]
        if failures:
            raise OSError(failures[0])


def _free(device: int, own: ctypes.c_uint64, opened: list[ctypes.c_uint64]) -> None:
    torch.cuda.set_device(device)  # the context of whichever thread this is
    for address in opened:
        _library().cuIpcCloseMemHandle(address)
    if own.value:
        _library().cuMemFree_v2(own)


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'error').decode()} ({status})")


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
