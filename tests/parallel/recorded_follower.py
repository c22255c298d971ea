"""A rank beyond the first with recorded graphs (recorded_graph.py) in place of CUDA's."""

from __future__ import annotations

from asyncllm.attention.torch_native import TorchAttention
from asyncllm.child_process import given_socket
from asyncllm.worker import step_captures
from asyncllm.worker.ranks.follower import Follower
from tests.worker.recorded_graph import ForgetfulPool

if __name__ == "__main__":
    TorchAttention.supports_graphs = True
    step_captures.GraphPool = ForgetfulPool  # type: ignore[misc]
    Follower(given_socket()).run()
