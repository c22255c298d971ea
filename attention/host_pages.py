"""The pinned host memory of swapped pages, allocated by a thread of its own.

Pinning 4 GiB takes more than a second, in the driver and without the GIL: enough to hide behind
loading weights. `tensor` waits for it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


class HostPages:
    """[num_pages, *page] of `dtype`, uninitialised; pinned where the device is CUDA."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        def allocate() -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")

        thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-pin")
        self._tensor = thread.submit(allocate)
        thread.shutdown(wait=False)  # it ends with its work

    @property
    def tensor(self) -> torch.Tensor:
        """Raises `RuntimeError` where there is no such memory."""
        return self._tensor.result()
