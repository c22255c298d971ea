"""Sums over the tensor-parallel ranks of one host, through memory that all of them address.

An all-reduce of a few rows is all latency: NCCL's takes 10 to 20 us, which a decode step pays twice
a layer. Here one kernel writes a row to the other ranks, waits for theirs, and goes on with what
follows the sum: the residual, and the next norm (kernel.py, and kernels/rms_norm).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.all_reduce.peer_memory import Exchange, PeerMemory

SETS = 3  # as kernel.py has them
NUMBER_BYTES = 2
# Bytes of all rows. With more, calls that follow each other took hundreds of us: docs/log/ranks.md.
MOST_IN_ONE_SHOT = {2: 256 << 10, 4: 128 << 10, 8: 64 << 10}
MOST_IN_TWO_SHOTS = {2: 0, 4: 256 << 10, 8: 256 << 10}
RANKS = tuple(MOST_IN_ONE_SHOT)


@dataclass(frozen=True, slots=True, eq=False)
class RowSums:
    """Arguments of a kernel that sums. peers: int64 addresses of each rank's memory, then that of
    the word that ends the waiting; calls: int32 [rows], the set that each row's next call takes."""

    peers: torch.Tensor
    calls: torch.Tensor
    rank: int
    num_ranks: int
    in_two_shots: bool


class PeerSums:
    """Sums of rows of `size` numbers of 16 bits. All ranks construct it together, and ask it for
    the same numbers of rows in the same order. Raises `OSError` as `PeerMemory` does."""

    def __init__(
        self, rank: int, num_ranks: int, size: int, device: torch.device, exchange: Exchange
    ) -> None:
        self._size = size
        with torch.inference_mode(False):  # it is written to outside of it, too
            self._closed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        row_bytes = size * NUMBER_BYTES
        most = {False: MOST_IN_ONE_SHOT[num_ranks] // row_bytes}
        if size % num_ranks == 0:
            most[True] = MOST_IN_TWO_SHOTS[num_ranks] // row_bytes
        self._memories: list[PeerMemory] = []
        self.forms: list[tuple[int, RowSums]] = []  # and of how many rows at most
        for in_two_shots, max_rows in most.items():
            if not max_rows:
                continue
            parts = 2 if in_two_shots else num_ranks
            memory = PeerMemory(rank, max_rows * SETS * parts * row_bytes, device, exchange)
            addresses = [*memory.addresses, self._closed.data_ptr()]
            peers = torch.tensor(addresses, dtype=torch.int64, device=device)
            calls = torch.zeros(max_rows, dtype=torch.int32, device=device)
            self._memories.append(memory)
            self.forms.append((max_rows, RowSums(peers, calls, rank, num_ranks, in_two_shots)))

    def find(self, x: torch.Tensor) -> RowSums | None:
        """How to sum x [T, size]; None: not here."""
        if x.dim() != 2 or x.shape[1] != self._size or x.element_size() != NUMBER_BYTES:
            return None
        return next((sums for max_rows, sums in self.forms if len(x) <= max_rows), None)

    def end_waiting(self) -> None:
        """Kernels that wait for other ranks end. From any thread."""
        self._closed.fill_(1)
