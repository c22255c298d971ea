"""A mesh of torch's collectives: Gloo over TCP between CPUs, NCCL between GPUs.

The process group is no default one of torch.distributed: the process may be an application's, with
one of its own. What NCCL has run on is in docs/log/ranks.md.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from asyncllm.kernels.all_reduce import RANKS, PeerRows, PeerSums, PeerWords, RowSums
from asyncllm.mesh_config import MeshConfig

logger = logging.getLogger("asyncllm")

_c10d: Any = distributed  # whose stubs lack much of it
# Of one call. Whoever supervises the ranks ends those that are late, and so the others' calls; that
# this has passed says that nobody does.
TIMEOUT = timedelta(hours=1)
CLOSE_SECONDS = 5.0

Shared = TypeVar("Shared", PeerSums, PeerRows, PeerWords)


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
        self,
        config: MeshConfig,
        store: Any,
        host: str,
        device: torch.device,
        row_size: int | None = None,
        engines: Any = None,
    ) -> None:
        """row_size: numbers of the rows that kernels are to sum, 16 bits each; None: none are.
        engines: the store of all ranks of the engines that share experts."""
        self.config = config
        self.num_calls = self.num_common_calls = 0
        self._device = device
        make = _nccl if device.type == "cuda" else _gloo
        self._all: Any = None if store is None else make(store, config.rank, config.size, host)
        self._stage: Any = self._all
        if config.pp > 1:
            of_stage = _c10d.PrefixStore(f"stage {config.stage}", store)
            self._stage = make(of_stage, config.place, config.tp, host)
        self._even: Any = self._all  # by which stages of even numbers send
        self._odd: Any = self._all
        if config.pp > 1 and device.type == "cuda":
            odd = _c10d.PrefixStore("odd stages", store)
            self._odd = make(odd, config.rank, config.size, host)
        self._everyone: Any = self._all
        self._engines: Any = self._all
        if config.dp > 1:
            everyone, peers = (
                _c10d.PrefixStore(name, engines) for name in ("everyone", f"rank {config.rank}")
            )
            number = config.engine * config.size + config.rank
            self._everyone = make(everyone, number, config.dp * config.size, host)
            self._engines = make(peers, config.engine, config.dp, host)
        self._closing: threading.Thread | None = None
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self.least(0)  # NCCL connects at the first call, which must not be a captured one
        self.row_slots: torch.Tensor | None = None
        self.sums: PeerSums | None = None
        self.rows: PeerRows | None = None
        self.words: PeerWords | None = None
        self._store = store
        if row_size is not None and config.tp > 1:
            store = _c10d.PrefixStore(f"memory {config.stage}", store)
            self.sums = self._share_memory(PeerSums, store, config.place, config.tp, row_size)
        if row_size is not None and config.dp > 1:
            store = _c10d.PrefixStore(f"memory {config.rank}", engines)
            self.rows = self._share_memory(PeerRows, store, config.engine, config.dp, row_size)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        if (sums := self.row_sums(x)) is not None:
            from asyncllm.kernels.all_reduce.kernel import all_reduce  # slow to import: Triton

            all_reduce(x, sums)
        else:
            self._finish(self._stage.allreduce([x], _in_stream(_c10d.AllreduceOptions())))
        return x

    def row_sums(self, x: torch.Tensor) -> RowSums | None:
        sums = None if self.sums is None else self.sums.find(x)
        if sums is not None:
            self.num_calls += 1
        return sums

    def share_words(self, num_bytes: int) -> PeerWords | None:
        store = _c10d.PrefixStore(f"words {self.config.stage}", self._store)
        place, num_ranks = self.config.place, self.config.tp
        self.words = self._share_memory(PeerWords, store, place, num_ranks, num_bytes)
        return self.words

    def _share_memory(
        self, make: type[Shared], store: Any, place: int, num_ranks: int, size: int
    ) -> Shared | None:
        """With other ranks, where they are on one host and reach each other."""
        numbers = count()

        def exchange(ours: bytes) -> list[bytes]:
            number = next(numbers)
            store.set(f"{number} {place}", b" " + ours)
            return [bytes(store.get(f"{number} {peer}"))[1:] for peer in range(num_ranks)]

        own = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        if num_ranks not in RANKS or any(host != own for host in exchange(own)):
            return None
        try:
            return make(place, num_ranks, size, self._device, exchange)
        except OSError as error:
            logger.info("falling back to NCCL, without memory that ranks share: %s", error)
            return None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        every = x.new_empty(self.config.tp * rows, columns)
        options = _in_stream(_c10d.distributed_c10d.AllgatherOptions())
        self._finish(self._stage._allgather_base(every, x.contiguous(), options))
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
        self._finish(self._stage.broadcast([x], _in_stream(_c10d.BroadcastOptions())))
        if self.config.pp == 1:
            self.num_common_calls += 1
        return x

    @contextmanager
    def rows_of(self, slots: torch.Tensor) -> Iterator[None]:
        self.row_slots = slots
        try:
            yield
        finally:
            self.row_slots = None

    def gather_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """In one call, whatever their dtypes: the bytes of a row lie beside each other."""
        if self.rows is not None and (gather := self.rows.find_gather(tensors)) is not None:
            from asyncllm.kernels.all_reduce.gather import gather_rows  # slow to import: Triton

            self.num_calls += 1
            return gather_rows(tensors, gather)
        parts = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        own = torch.cat(parts, dim=1)
        every = own.new_empty(self.config.dp * len(own), own.shape[1])
        options = _in_stream(_c10d.distributed_c10d.AllgatherOptions())
        self._finish(self._engines._allgather_base(every, own, options))
        columns = every.split([part.shape[1] for part in parts], dim=1)
        pairs = zip(columns, tensors, strict=True)
        return [each.contiguous().view(tensor.dtype) for each, tensor in pairs]

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is not None and (sums := self.rows.find_sums(x)) is not None:
            from asyncllm.kernels.all_reduce.kernel import reduce_scatter

            self.num_calls += 1
            return reduce_scatter(x, sums)
        own = x.new_empty(len(x) // self.config.dp, x.shape[1])
        options = _in_stream(_c10d.distributed_c10d.ReduceScatterOptions())
        self._finish(self._engines._reduce_scatter_base(own, x.contiguous(), options))
        return own

    def least(self, number: int) -> int:
        numbers = torch.tensor([number], device=self._device)
        self._finish(self._everyone.allreduce([numbers], _c10d.ReduceOp.MIN))
        self.num_common_calls += 1
        return int(numbers)

    def _neighbour(self, num_stages: int) -> int:
        return (self.config.rank + num_stages * self.config.tp) % self.config.size

    def _finish(self, call: Any) -> None:
        if call is not None:  # NCCL's, in the current stream
            call.wait()
        self.num_calls += 1

    def limit(self, seconds: float) -> None:
        """From now on a call ends with an error when it has waited so long for others: Gloo's do
        not end by `close` while a rank that nobody can kill stands still."""
        for group in self._groups:
            group._set_default_timeout(timedelta(seconds=seconds))

    def close(self) -> None:
        """Ends calls that wait, with an error. From any thread; once, however often called."""
        if self._closing is not None:
            return
        for memory in (self.sums, self.rows, self.words):
            if memory is not None:
                memory.end_waiting()
        # NCCL's returns when no graph is left that has calls of it.
        self._closing = threading.Thread(target=self._abort, name="asyncllm-mesh", daemon=True)
        self._closing.start()

    def _abort(self) -> None:
        for group in self._groups:
            group.abort()

    def wait_closed(self) -> None:
        """After `close`, and when captured graphs are gone: until threads have ended and memory is
        given back, or for CLOSE_SECONDS."""
        if self._closing is not None:
            self._closing.join(CLOSE_SECONDS)
        self.sums = self.rows = self.words = None

    @property
    def _groups(self) -> set[Any]:
        every = {self._all, self._stage, self._odd, self._everyone, self._engines}
        return every - {None}


def _in_stream(options: Any) -> Any:
    """NCCL's kernel among those of the current stream, without events to another and back."""
    options.asyncOp = False
    return options


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
