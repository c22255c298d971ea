"""Sums over ranks and gathered rows, by processes that share memory: under Triton's interpreter.

Under the interpreter the ranks are forked and address the same pages, so what waits for another
rank's numbers really waits.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import pytest
import torch

from asyncllm.kernels.all_reduce import SETS, RowGather, RowSums
from asyncllm.kernels.records import Norm

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED, reason="on GPUs: tests/gpu/test_two_gpus.py"),
]
MAX_ROWS = 3
SECONDS = 120


class SharedRanks:
    """The sums of `PeerSums`, in memory that forked processes share."""

    def __init__(self, num_ranks: int, size: int, *, in_two_shots: bool) -> None:
        parts = 2 if in_two_shots else num_ranks
        self._memories = [
            torch.full((MAX_ROWS * SETS * parts * size,), -1, dtype=torch.int16).share_memory_()
            for _ in range(num_ranks)
        ]
        self.closed = torch.zeros(1, dtype=torch.int32).share_memory_()
        self._in_two_shots = in_two_shots

    def sums(self, rank: int) -> RowSums:
        addresses = [memory.data_ptr() for memory in (*self._memories, self.closed)]
        calls = torch.zeros(MAX_ROWS, dtype=torch.int32)
        num_ranks = len(self._memories)
        return RowSums(torch.tensor(addresses), calls, rank, num_ranks, self._in_two_shots)

    def gather(self, rank: int, row_words: int) -> RowGather:
        sums = self.sums(rank)
        return RowGather(sums.peers, sums.calls, rank, sums.num_ranks, row_words)


def on_ranks(num_ranks: int, run: Callable[[int], None]) -> None:
    """Each rank's `run` in a process of its own; an error there is one here."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank,)) for rank in range(num_ranks)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(SECONDS)
        each.kill()
    assert [each.exitcode for each in ranks] == [0] * num_ranks


def summands(num_ranks: int, call: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Each rank's rows of a call; fewer in some calls than in others. Integers: sums are exact."""
    generator = torch.Generator().manual_seed(call)
    shape = (num_ranks, MAX_ROWS - call % 2, size)
    return list(torch.randint(-20, 20, shape, generator=generator).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_ranks", "in_two_shots"), [(2, False), (4, False), (4, True)])
def test_sums_are_those_of_all_ranks(
    num_ranks: int, in_two_shots: bool, dtype: torch.dtype
) -> None:
    from asyncllm.kernels.all_reduce.kernel import all_reduce

    size = 24
    shared = SharedRanks(num_ranks, size, in_two_shots=in_two_shots)

    def run(rank: int) -> None:
        sums = shared.sums(rank)
        for call in range(2 * SETS + 1):
            every = summands(num_ranks, call, size, dtype)
            x = every[rank].clone()
            all_reduce(x, sums)
            assert torch.equal(x, torch.stack(every).float().sum(0).to(dtype)), (rank, call)

    on_ranks(num_ranks, run)


@pytest.mark.parametrize("in_two_shots", [False, True])
def test_a_norm_is_that_of_the_sum(in_two_shots: bool) -> None:
    from asyncllm.kernels.rms_norm.kernel import add_rms_norm, add_rms_norm_in_bytes

    num_ranks, size, dtype = 2, 40, torch.bfloat16
    shared = SharedRanks(num_ranks, size, in_two_shots=in_two_shots)
    norm = Norm(torch.rand(size).to(dtype) + 0.5, 1e-5)
    in_bytes = Norm(norm.weight, norm.eps, in_bytes=torch.int8)

    def run(rank: int) -> None:
        sums = shared.sums(rank)
        for call in range(4):
            every = summands(num_ranks, call, size, dtype)
            expected, residual = torch.stack(every).float().sum(0).to(dtype), every[0] * 2
            x, own_residual, expected_residual = every[rank].clone(), residual.clone(), residual
            if call % 2:
                made = add_rms_norm_in_bytes(x, own_residual, in_bytes, sums)
                whole = add_rms_norm_in_bytes(expected, expected_residual, in_bytes)
                assert all(map(torch.equal, made, whole))
            else:
                add_rms_norm(x, own_residual, norm, sums)
                add_rms_norm(expected, expected_residual, norm)
            assert torch.equal(x, expected) and torch.equal(own_residual, expected_residual)

    on_ranks(num_ranks, run)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_are_scattered(num_ranks: int) -> None:
    from asyncllm.kernels.all_reduce.kernel import all_reduce, reduce_scatter

    size, dtype = 24, torch.bfloat16
    shared = SharedRanks(num_ranks, size, in_two_shots=False)

    def run(rank: int) -> None:
        sums = shared.sums(rank)
        for call in range(2 * SETS + 1):
            of_ranks = [summands(num_ranks, 10 * call + e, size, dtype) for e in range(num_ranks)]
            rows = min(len(each[0]) for each in of_ranks)
            x = torch.cat([each[rank][:rows] for each in of_ranks])  # one engine's below the other
            expected = torch.stack([each[:rows] for each in of_ranks[rank]]).float().sum(0)
            assert torch.equal(reduce_scatter(x, sums), expected.to(dtype)), (rank, call)
            if call == 3:  # another kind of call by the same memory
                whole = torch.stack(summands(num_ranks, 5, size, dtype))
                all_reduce(mine := whole[rank].clone(), sums)
                assert torch.equal(mine, whole.float().sum(0).to(dtype))

    on_ranks(num_ranks, run)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_are_gathered(num_ranks: int) -> None:
    from asyncllm.kernels.all_reduce.gather import gather_rows

    size = 24
    row_words = 40
    shared = SharedRanks(num_ranks, 2 * row_words, in_two_shots=False)

    def rows_of(rank: int, call: int) -> tuple[torch.Tensor, ...]:
        """Values, experts and gates, in some calls more."""
        torch.manual_seed(10 * call + rank)
        rows = MAX_ROWS - call % 2
        values = torch.randn(rows, size).to(torch.float16)
        ids, slots = torch.randint(128, (rows, 3)), torch.randint(5, (rows, 1), dtype=torch.int32)
        every = values, ids, torch.rand(rows, 3), slots, torch.rand(rows, 7)
        return every[: 3 + call % 3]

    def run(rank: int) -> None:
        gather = shared.gather(rank, row_words)
        for call in range(2 * SETS + 1):
            found = gather_rows(rows_of(rank, call), gather)
            of_ranks = zip(*(rows_of(each, call) for each in range(num_ranks)), strict=True)
            for ours, expected in zip(found, of_ranks, strict=True):
                assert torch.equal(ours, torch.cat(expected)), (rank, call)

    on_ranks(num_ranks, run)


def test_a_word_that_means_nothing_arrives_as_nan() -> None:
    from asyncllm.kernels.all_reduce.gather import gather_rows

    shared = SharedRanks(2, 32, in_two_shots=False)

    def run(rank: int) -> None:
        x = torch.full((1, 8), -1, dtype=torch.int32)
        tensors = x.view(torch.bfloat16), x.view(torch.float32)
        assert all(each.isnan().all() for each in gather_rows(tensors, shared.gather(rank, 16)))

    on_ranks(2, run)


@pytest.mark.parametrize("kind", ["sum", "in two shots", "scatter", "gather"])
def test_waiting_ends_when_it_is_closed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncllm.kernels.all_reduce import kernel
    from asyncllm.kernels.all_reduce.gather import gather_rows
    from asyncllm.kernels.all_reduce.kernel import all_reduce, reduce_scatter

    monkeypatch.setattr(kernel, "POLLS", 16)

    shared = SharedRanks(2, 32, in_two_shots=kind == "in two shots")
    shared.closed.fill_(1)

    def run(rank: int) -> None:
        x = torch.ones(2 if kind == "scatter" else 1, 32, dtype=torch.bfloat16)
        if kind == "gather":
            gather_rows((x[:, :16].contiguous(), x[:, :2].float()), shared.gather(rank, 16))
        elif kind == "scatter":
            reduce_scatter(x, shared.sums(rank))
        else:
            all_reduce(x, shared.sums(rank))

    on_ranks(1, run)


def test_numbers_that_mean_nothing_arrive_as_nan() -> None:
    from asyncllm.kernels.all_reduce.kernel import all_reduce

    shared = SharedRanks(2, 16, in_two_shots=False)

    def run(rank: int) -> None:
        x = torch.full((1, 16), -1, dtype=torch.int16).view(torch.bfloat16)
        all_reduce(x, shared.sums(rank))
        assert x.isnan().all()

    on_ranks(2, run)
