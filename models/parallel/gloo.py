"""A mesh over TCP, by Gloo: ranks on CPUs.

The process group is no default one of torch.distributed: the process may be an application's, with
one of its own.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from asyncllm.mesh_config import MeshConfig

_c10d: Any = distributed  # whose stubs lack much of it
# Of one call. Whoever supervises the ranks ends those that are late, and so the others' calls; that
# this has passed says that nobody does.
TIMEOUT = timedelta(hours=1)


def open_store(num_ranks: int, listener: socket.socket) -> Any:
    """Where ranks find each other, in this process, at an address that is listened at already."""
    return _c10d.TCPStore(
        *listener.getsockname()[:2],
        world_size=num_ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def find_store(num_ranks: int, host: str, port: int) -> Any:
    """The store that another process has opened."""
    return _c10d.TCPStore(host, port, world_size=num_ranks, is_master=False)


class GlooMesh:
    """Implements `Mesh`. `host`: the address at which the others reach this rank.

    `num_calls` counts finished calls: whoever supervises the ranks sees by it that they get on.
    A rank that is gone ends the others' calls with a `RuntimeError`.
    """

    def __init__(self, config: MeshConfig, store: Any, host: str) -> None:
        self.config = config
        self.num_calls = 0
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = TIMEOUT
        self._group = _c10d.ProcessGroupGloo(store, config.rank, config.tp, options)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([x]).wait()
        self.num_calls += 1
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        every = x.new_empty(self.config.tp * rows, columns)
        self._group._allgather_base(every, x.contiguous()).wait()
        self.num_calls += 1
        return every.view(-1, rows, columns).transpose(0, 1).reshape(rows, -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._group.broadcast(x, 0).wait()
        self.num_calls += 1
        return x

    def least(self, number: int) -> int:
        numbers = torch.tensor([number])
        self._group.allreduce([numbers], distributed.ReduceOp.MIN).wait()
        self.num_calls += 1
        return int(numbers)

    def close(self) -> None:
        """Ends calls that wait, with an error."""
        self._group.abort()
