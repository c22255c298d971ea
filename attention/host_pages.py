"""The pinned host memory of swapped pages, allocated by a thread of its own.

Where the driver allocates what it pins, all other threads stand still: two seconds for 4 GiB, in
which none gets a fresh page of this process's address space. So the memory is the process's own, is
made to be there first, and then pinned. `tensor` waits for it.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

NUM_TOUCHING = 4  # threads


class HostPages:
    """[num_pages, *page] of `dtype`, its contents undefined; pinned where the device is CUDA."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        def allocate() -> torch.Tensor:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            if device.type != "cuda" or num_bytes == 0:
                return torch.empty(shape, dtype=dtype)
            memory = None
            with suppress(OSError, RuntimeError):  # no such memory, or none that may be pinned
                memory = _pin(num_bytes)
            if memory is None:  # what could not be pinned is given back by now
                return _pinned_by_driver(num_bytes).view(dtype).view(shape)
            # An open request holds no page here by then: a worker drains before it lets go.
            weakref.finalize(self, _unpin, memory).atexit = False
            return memory.view(dtype).view(shape)

        thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-pin")
        self._tensor = thread.submit(allocate)
        thread.shutdown(wait=False)  # it ends with its work

    @property
    def tensor(self) -> torch.Tensor:
        """Raises `RuntimeError` where there is no such memory."""
        return self._tensor.result()


def _pin(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], of large pages where the kernel has some. Raises where it cannot be."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child would make it copied when written, away from where the device reads it.
    memory.madvise(mmap.MADV_DONTFORK)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(NUM_TOUCHING, "asyncllm-pin") as threads:
        list(threads.map(_touch, tensor.chunk(NUM_TOUCHING)))
    error = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0))
    if error:
        raise RuntimeError(f"cudaHostRegister: CUDA error {error}")
    return tensor


def _touch(memory: torch.Tensor) -> None:
    """Makes it be there, without the GIL."""
    ctypes.memset(memory.data_ptr(), 0, memory.nbytes)


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _pinned_by_driver(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
