"""A tensor-parallel rank on a CPU whose decode steps are run by the persistent kernel, emulated.

`set_up` makes this process one; run as a program it is a rank beyond the first. Ranks share files
in place of GPUs' memory, and a graph is the function that it was to capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from asyncllm.attention.torch_native import TorchAttention
from asyncllm.child_process import given_socket
from asyncllm.graphs.pool import GraphPool, Outputs, Recorded
from asyncllm.kernels import persistent_decode
from asyncllm.kernels.declaration import CudaKernel, Definitions, Launch
from asyncllm.models.parallel.collectives import CollectiveMesh
from asyncllm.worker import step_captures
from asyncllm.worker.ranks.follower import Follower
from tests.cuda.emulated import load_for_cpu

NUM_BLOCKS, NUM_RANKS = 3, 2
FLAGS = ("-DHEAD_DIM=64", "-DGROUP_SIZE=2", "-DBLOCK_SIZE=16", f"-DRANKS={NUM_RANKS}")
SHARED = "EMULATED_RANKS"  # names the folder of the kernel and of what ranks share
KERNEL = "kernel.so"
shared: list[list[np.ndarray]] = []  # as a mesh keeps what its ranks share


class CallingPool(GraphPool):
    def record(self, run: Callable[[], Outputs]) -> Recorded:
        outputs = run()

        def replay() -> None:
            for old, new in zip(outputs, run(), strict=True):
                old.copy_(new)

        graph: Any = SimpleNamespace(replay=replay, reset=lambda: None)
        return Recorded(graph, outputs)


def share_words(self: CollectiveMesh, num_bytes: int) -> Any:
    folder = Path(os.environ[SHARED])
    names = [folder / f"of rank {rank}" for rank in range(self.config.tp)]
    names[self.config.rank].write_bytes(b"\xff" * num_bytes)
    self.least(0)  # all are there
    shared.append([*(np.memmap(name, mode="r+") for name in names), np.zeros(1, np.int32)])
    *addresses, closed = (memory.ctypes.data for memory in shared[-1])
    return SimpleNamespace(rank=self.config.rank, addresses=addresses, closed=closed)


def begin_loading(
    declared: CudaKernel, device: torch.device, definitions: Definitions | None
) -> Callable[[], Launch | None]:
    if declared is not persistent_decode.KERNEL or definitions is None:
        return lambda: None
    assert definitions == FLAGS
    return lambda: load_for_cpu(declared, Path(os.environ[SHARED]) / KERNEL)


def set_up(put: Callable[[Any, str, Any], None] = setattr) -> None:
    put(TorchAttention, "supports_graphs", True)
    put(step_captures, "GraphPool", CallingPool)
    put(CudaKernel, "supports", lambda declared, device: True)
    put(CudaKernel, "begin_loading", begin_loading)
    put(CollectiveMesh, "share_words", share_words)
    for module in (persistent_decode, step_captures):
        put(module, "num_sms", lambda device: NUM_BLOCKS)


if __name__ == "__main__":
    set_up()
    Follower(given_socket()).run()
