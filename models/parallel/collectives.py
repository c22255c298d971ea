"""A mesh of torch's collectives: Gloo over TCP between CPUs, NCCL between GPUs.

The process group is no default one of torch.distributed: the process may be an application's, with
one of its own. NCCL has not been run on several GPUs (docs/log/ranks.md).
"""

from __future__ import annotations

import os
import socket
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

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


class EngineStore(NamedTuple):
    """Where the ranks of engines that share experts find each other: of all of them."""

    store: Any
    address: tuple[str, int]


class CollectiveMesh:
    """Implements `Mesh`. `store`: of the ranks of one engine, None where it has one; `engines`: of
    all ranks of engines that share experts. `host`: the address at which the others reach this one.

    Construction waits for all ranks. On CUDA a call enqueues on the current stream and may be
    captured. `num_calls` counts calls: on a CPU, finished ones, by which whoever supervises the
    ranks sees that they get on; `num_common_calls` those that the ranks of all stages make. A rank
    that is gone ends the others' calls with a `RuntimeError`.

    NCCL does the calls between two ranks in the order of each, and both wait: of two stages, which
    send to each other, each has a group of its own to send by.
    """

    def __init__(
        self, config: MeshConfig, store: Any, host: str, device: torch.device, engines: Any = None
    ) -> None:
        self.config = config
        self.num_calls = self.num_common_calls = 0
        self._device = device
        make = _nccl if device.type == "cuda" else _gloo
        self._all = self._stage = self._engines = None
        if store is not None:
            self._all = self._stage = make(store, config.rank, config.size, host)
        if config.pp > 1:
            of_stage = _c10d.PrefixStore(f"stage {config.stage}", store)
            self._stage = make(of_stage, config.place, config.tp, host)
        self._even = self._odd = self._all  # by which stages of even and odd numbers send
        if config.pp > 1 and device.type == "cuda":
            odd = _c10d.PrefixStore("odd stages", store)
            self._odd = make(odd, config.rank, config.size, host)
        self._everyone = self._all
        if config.dp > 1:
            everyone, peers = (
                _c10d.PrefixStore(name, engines) for name in ("everyone", f"rank {config.rank}")
            )
            number = config.engine * config.size + config.rank
            self._everyone = make(everyone, number, config.dp * config.size, host)
            self._engines = make(peers, config.engine, config.dp, host)
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self.least(0)  # NCCL connects at the first call, which must not be a captured one

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._finish(self._stage.allreduce([x]))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        every = x.new_empty(self.config.tp * rows, columns)
        self._finish(self._stage._allgather_base(every, x.contiguous()))
        return every.view(-1, rows, columns).transpose(0, 1).reshape(rows, -1)

    def send(self, x: torch.Tensor) -> None:
        kept = x.clone()
        group = self._odd if self.config.stage % 2 else self._even
        self._sending.append((group.send([kept], self._neighbour(1), 0), kept))
        self._forget_sent()

    def _forget_sent(self) -> None:
        """Let go of sends that have ended. NCCL says so; Gloo's are waited for, the oldest where
        there are more than steps in flight: its receiver is then behind by as many."""
        is_gloo = self._device.type == "cpu"
        while self._sending:
            call, _ = self._sending[0]
            if is_gloo and len(self._sending) <= self.config.pp:
                return
            if not is_gloo and not call.is_completed():
                return
            if is_gloo:
                call.wait()
            self._sending.popleft()
            self.num_calls += 1

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        before = (self.config.stage - 1) % self.config.pp
        group = self._odd if before % 2 else self._even
        self._finish(group.recv([x], self._neighbour(-1), 0))
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._finish(self._stage.broadcast(x, 0))
        if self.config.pp == 1:
            self.num_common_calls += 1
        return x

    def gather_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """In one call, whatever their dtypes: the bytes of a row lie beside each other."""
        parts = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        own = torch.cat(parts, dim=1)
        every = own.new_empty(self.config.dp * len(own), own.shape[1])
        self._finish(self._engines._allgather_base(every, own))
        columns = every.split([part.shape[1] for part in parts], dim=1)
        pairs = zip(columns, tensors, strict=True)
        return [each.contiguous().view(tensor.dtype) for each, tensor in pairs]

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        own = x.new_empty(len(x) // self.config.dp, x.shape[1])
        self._finish(self._engines._reduce_scatter_base(own, x.contiguous()))
        return own

    def least(self, number: int) -> int:
        numbers = torch.tensor([number], device=self._device)
        self._finish(self._everyone.allreduce([numbers], _c10d.ReduceOp.MIN))
        self.num_common_calls += 1
        return int(numbers)

    def _neighbour(self, num_stages: int) -> int:
        return (self.config.rank + num_stages * self.config.tp) % self.config.size

    def _finish(self, call: Any) -> None:
        call.wait()
        self.num_calls += 1

    def limit(self, seconds: float) -> None:
        """From now on a call ends with an error when it has waited so long for others: Gloo's do
        not end by `close` while a rank that nobody can kill stands still."""
        for group in self._groups:
            group._set_default_timeout(timedelta(seconds=seconds))

    def close(self) -> None:
        """Ends calls that wait, with an error. From any thread."""
        for group in self._groups:
            group.abort()

    @property
    def _groups(self) -> set[Any]:
        every = {self._all, self._stage, self._odd, self._everyone, self._engines}
        return every - {None}


def _gloo(store: Any, rank: int, num_ranks: int, host: str) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = TIMEOUT
    return _c10d.ProcessGroupGloo(store, rank, num_ranks, options)


def _nccl(store: Any, rank: int, num_ranks: int, host: str) -> Any:
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # no NVLink multicast, whatever the machine has
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return _c10d.ProcessGroupNCCL(store, rank, num_ranks, options)
