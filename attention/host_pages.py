"""The pinned host memory of swapped pages, allocated in a thread.

If the driver allocates pinned memory, all other threads that need new memory are blocked, for two
seconds with 4 GiB. So the process maps the memory itself, touches it, and then pins it. `tensor`
waits for it.
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
    """A tensor of this shape and dtype with undefined contents; pinned if the device is CUDA."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        def allocate() -> torch.Tensor:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            if device.type != "cuda" or num_bytes == 0:
                return torch.empty(shape, dtype=dtype)
            memory = None
            with suppress(OSError, RuntimeError):  # not enough memory, or pinning is not allowed
                memory = _pin(num_bytes)
            if memory is None:
                return _pinned_by_driver(num_bytes).view(dtype).view(shape)
            # No copy is under way then, as a worker drains before it closes.
            weakref.finalize(self, _unpin, memory).atexit = False
            return memory.view(dtype).view(shape)

        thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-pin")
        self._tensor = thread.submit(allocate)
        thread.shutdown(wait=False)  # ends when it is done

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, once it is allocated. Raises `RuntimeError` if that fails."""
        return self._tensor.result()


def _pin(num_bytes: int) -> torch.Tensor:
    """Pinned memory, uint8 [num_bytes], of huge pages if possible. Raises if it cannot be had."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked child would cause copy-on-write, and the device would read the old page.
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
    """Have the kernel allocate the memory, without the GIL."""
    ctypes.memset(memory.data_ptr(), 0, memory.nbytes)


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _pinned_by_driver(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
