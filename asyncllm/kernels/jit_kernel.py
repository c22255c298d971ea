"""A CUDA kernel of ours as a function of Python's, on devices that can launch it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import torch

from asyncllm.kernels.declaration import CudaKernel, Launch

logger = logging.getLogger("asyncllm")


def num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def current_stream(tensor: torch.Tensor) -> int:
    """Address of the tensor's device's; 0 on a CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


class JitKernel:
    """Compiled in the background where no start did it before. No engine fails to start for a
    faster kernel: one that is not compiled, or cannot be launched, is not ready."""

    def __init__(self, kernel: CudaKernel, device: torch.device) -> None:
        """`device`: on one that the kernel does not support it never is ready."""
        self._kernel = kernel
        self._loading: Callable[[], Launch | None] | None = None
        self._launch: Launch | None = None
        self._num_blocks = 0
        if kernel.supports(device):
            self._loading = kernel.begin_loading(device)
            self._num_blocks = num_sms(device)

    def is_ready(self, run_once: Callable[[], object]) -> bool:
        """Waits for the compiler, and has `run_once` launch the kernel, at the first call."""
        if self._loading is not None:
            self._launch, self._loading = self._loading(), None
            if self._launch is not None:
                try:
                    run_once()
                except RuntimeError as error:  # it says whose
                    logger.info("falling back to %s: %s", self._kernel.falls_back_to, error)
                    self._launch = None
        return self._launch is not None

    def run(self, args: ctypes.Structure, out: torch.Tensor) -> None:
        """`out`: what it writes. Capturable. Raises `RuntimeError` where the device refuses it."""
        assert self._launch is not None, "called without having been asked"
        self._kernel.launch(self._launch, args, self._num_blocks, current_stream(out))
