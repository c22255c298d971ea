"""A CUDA source of ours that multiplies, where this device can launch it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from asyncllm.attention import cuda_source
from asyncllm.attention.cuda_source import Launch

logger = logging.getLogger("asyncllm")


class TriedKernel:
    """`function` of `source`, compiled meanwhile where no start did it before. No engine fails to
    start for a faster kernel: one that is not compiled, or cannot be launched, is not ready."""

    def __init__(self, source: Path, function: str, device: torch.device) -> None:
        """`device`: one that the source supports, or a CPU, where it never is ready."""
        self._source = source
        self._loading: Callable[[], Launch | None] | None = None
        self._launch: Launch | None = None
        self._num_blocks = 0
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            self._loading = cuda_source.begin_loading_launch(source, function, capability, ())
            properties = torch.cuda.get_device_properties(device)
            self._num_blocks = properties.multi_processor_count

    def is_ready(self, run_once: Callable[[], object]) -> bool:
        """Waits for the compiler, and has `run_once` launch the kernel, at the first call."""
        if self._loading is not None:
            self._launch, self._loading = self._loading(), None
            if self._launch is not None:
                try:
                    run_once()
                except RuntimeError as error:
                    logger.info("products are left to cuBLAS: %s", error)  # it says whose
                    self._launch = None
        return self._launch is not None

    def run(self, args: ctypes.Structure, out: torch.Tensor) -> None:
        """`out`: what it writes. Capturable. Raises `RuntimeError` where the device refuses it."""
        assert self._launch is not None, "called without having been asked"
        stream = torch.cuda.current_stream(out.device).cuda_stream if out.is_cuda else 0
        if error := self._launch(ctypes.byref(args), self._num_blocks, stream):
            raise RuntimeError(f"{self._source.stem}: CUDA error {error}")
