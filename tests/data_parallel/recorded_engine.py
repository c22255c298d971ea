"""An engine's process with recorded graphs (recorded_graph.py) in place of CUDA's, on a CPU.

Calls between the engines are operations of torch here, so that a recording has them. With WHOLE set
a graph has all of a step with prompts, else it breaks at attention.
"""

from __future__ import annotations

import os

import torch
import uvloop

from asyncllm.attention.torch_native import TorchAttention
from asyncllm.child_process import given_socket
from asyncllm.engine.data_parallel.process import serve
from asyncllm.models.parallel.collectives import CollectiveMesh
from asyncllm.worker import step_captures
from tests.worker.recorded_graph import ForgetfulPool
from tests.worker.test_graphs import TokenAttention

WHOLE = "RECORD_WHOLE_STEPS"
gather_rows, sum_rows = CollectiveMesh.gather_rows, CollectiveMesh.sum_rows
meshes: list[CollectiveMesh] = []  # of this process


@torch.library.custom_op("asyncllm_test::gather_rows", mutates_args=())
def recorded_gather(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return gather_rows(meshes[0], *tensors)


@torch.library.custom_op("asyncllm_test::sum_rows", mutates_args=())
def recorded_sum(x: torch.Tensor) -> torch.Tensor:
    return sum_rows(meshes[0], x)


def gather(self: CollectiveMesh, *tensors: torch.Tensor) -> list[torch.Tensor]:
    meshes[:] = [self]
    return list(recorded_gather(list(tensors)))


def summed(self: CollectiveMesh, x: torch.Tensor) -> torch.Tensor:
    meshes[:] = [self]
    return recorded_sum(x)


if __name__ == "__main__":
    CollectiveMesh.gather_rows = gather  # type: ignore[method-assign]
    CollectiveMesh.sum_rows = summed  # type: ignore[method-assign]
    TorchAttention.supports_graphs = True
    step_captures.GraphPool = ForgetfulPool  # type: ignore[misc]
    if os.environ.get(WHOLE):
        TorchAttention.step_attention = lambda self, most: TokenAttention(self, most)  # type: ignore[method-assign]
    uvloop.run(serve(given_socket()))
