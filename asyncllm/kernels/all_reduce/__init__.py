"""Sums over the ranks of one host, and rows gathered from them, through memory that all address.

An all-reduce of a few rows is all latency: NCCL's takes 10 to 20 us, which a decode step pays twice
a layer. Here one kernel writes a row to the other ranks, waits for theirs, and goes on with what
follows the sum: the residual, and the next norm (kernel.py, and kernels/rms_norm). Engines that
share experts gather rows (gather.py) and scatter their sums likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.all_reduce.peer_memory import Exchange, PeerMemory

SETS = 3  # as kernel.py has them
NUMBER_BYTES, WORD_BYTES = 2, 4
# By ranks, bytes of all rows: where a form is the fastest (docs/log/ranks.md; 8 ranks were not
# measured). There is memory for SETS * ranks times as much, of two shots for SETS * 2 times.
MOST_IN_ONE_SHOT = {2: 1 << 20, 4: 256 << 10, 8: 64 << 10}
MOST_IN_TWO_SHOTS = {2: 16 << 20, 4: 16 << 20, 8: 256 << 10}
MOST_GATHERED = {2: 128, 4: 128, 8: 32}  # rows of an engine
MAX_TENSORS = 5  # gathered at a time
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


@dataclass(frozen=True, slots=True, eq=False)
class RowGather:
    """Arguments of the kernel that gathers, as in `RowSums`. row_words: room for a row's words."""

    peers: torch.Tensor
    calls: torch.Tensor
    rank: int
    num_ranks: int
    row_words: int


class SharedMemory:
    """Memory of each rank that all ranks address. They construct it together. Raises `OSError` as
    `PeerMemory` does."""

    def __init__(self, rank: int, device: torch.device, exchange: Exchange) -> None:
        self.rank, self._device, self._exchange = rank, device, exchange
        self._memories: list[PeerMemory] = []
        with torch.inference_mode(False):  # it is written to outside of it, too
            self._closed = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def _addresses(self, num_bytes: int) -> list[int]:
        """Every rank's, of so many bytes of each."""
        memory = PeerMemory(self.rank, num_bytes, self._device, self._exchange)
        self._memories.append(memory)
        return memory.addresses

    def end_waiting(self) -> None:
        """Kernels that wait for other ranks end. From any thread."""
        self._closed.fill_(1)


class SharedRows(SharedMemory):
    """Memory of each rank for rows of `size` numbers of 16 bits. All ranks ask it for the same
    numbers of rows in the same order."""

    def __init__(self, rank: int, size: int, device: torch.device, exchange: Exchange) -> None:
        super().__init__(rank, device, exchange)
        self._size = size

    def _share(self, max_rows: int, bytes_of_set: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`RowSums.peers` and `calls`, of memory for so many rows."""
        addresses = [*self._addresses(max_rows * SETS * bytes_of_set), self._closed.data_ptr()]
        peers = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        return peers, torch.zeros(max_rows, dtype=torch.int32, device=self._device)


class PeerSums(SharedRows):
    """Sums of rows over tensor-parallel ranks."""

    def __init__(
        self, rank: int, num_ranks: int, size: int, device: torch.device, exchange: Exchange
    ) -> None:
        super().__init__(rank, size, device, exchange)
        row_bytes = size * NUMBER_BYTES
        most = {False: MOST_IN_ONE_SHOT[num_ranks] // row_bytes}
        if size % num_ranks == 0:
            most[True] = MOST_IN_TWO_SHOTS[num_ranks] // row_bytes
        self.forms: list[tuple[int, RowSums]] = []  # and of how many rows at most
        for in_two_shots, max_rows in most.items():
            if not max_rows:
                continue
            parts = 2 if in_two_shots else num_ranks
            arrays = self._share(max_rows, parts * row_bytes)
            self.forms.append((max_rows, RowSums(*arrays, rank, num_ranks, in_two_shots)))

    def find(self, x: torch.Tensor) -> RowSums | None:
        """How to sum x [T, size]; None: not here."""
        if x.dim() != 2 or x.shape[1] != self._size or x.element_size() != NUMBER_BYTES:
            return None
        return next((sums for max_rows, sums in self.forms if len(x) <= max_rows), None)


class PeerRows(SharedRows):
    """Rows of engines that share experts, and what belongs to them, gathered; sums scattered."""

    def __init__(
        self, rank: int, num_ranks: int, size: int, device: torch.device, exchange: Exchange
    ) -> None:
        super().__init__(rank, size, device, exchange)
        row_bytes = size * NUMBER_BYTES
        self.max_rows = MOST_GATHERED[num_ranks]
        words = size + 256  # half of it, the parts of a norm's factor, experts and gates
        of_sums = self._share(self.max_rows, num_ranks * row_bytes)
        of_rows = self._share(self.max_rows, num_ranks * words * WORD_BYTES)
        self._sums = RowSums(*of_sums, rank, num_ranks, in_two_shots=False)
        self._gather = RowGather(*of_rows, rank, num_ranks, words)

    def find_gather(self, tensors: tuple[torch.Tensor, ...]) -> RowGather | None:
        """How to gather them, [T, n] each; None: not here."""
        num_bytes = [each.shape[1] * each.element_size() for each in tensors]
        if len(tensors[0]) > self.max_rows or len(tensors) > MAX_TENSORS:
            return None
        if any(each % WORD_BYTES for each in num_bytes):
            return None
        return self._gather if sum(num_bytes) <= self._gather.row_words * WORD_BYTES else None

    def find_sums(self, x: torch.Tensor) -> RowSums | None:
        """How to scatter the sums of x [ranks * T, size]; None: not here."""
        if x.dim() != 2 or x.shape[1] != self._size or x.element_size() != NUMBER_BYTES:
            return None
        return self._sums if len(x) <= self.max_rows * self._sums.num_ranks else None


class PeerWords(SharedMemory):
    """Memory of each rank for words that a kernel of the caller's sends to other ranks and waits
    for, all bits one. `addresses`: every rank's; `closed`: that of the word that ends the waiting.
    """

    def __init__(
        self, rank: int, num_ranks: int, size: int, device: torch.device, exchange: Exchange
    ) -> None:
        """size: bytes of each rank."""
        super().__init__(rank, device, exchange)
        self.addresses = self._addresses(size)
        self.closed = self._closed.data_ptr()
