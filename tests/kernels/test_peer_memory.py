"""Which sums, gathered rows and scattered sums go by memory that ranks share, and in which form."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from asyncllm.kernels import all_reduce
from asyncllm.kernels.all_reduce import PeerRows, PeerSums

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is as many addresses."""
    memory = SimpleNamespace(addresses=[0, 0])
    monkeypatch.setattr(all_reduce, "PeerMemory", lambda *_: memory)
    zeros = torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda *sizes, pin_memory=False, **how: zeros(*sizes, **how)
    )


def rows(number: int, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(number, size, dtype=dtype, device="meta")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums(num_ranks: int) -> None:
    make = partial(PeerSums, 0, num_ranks, device=CPU, exchange=lambda ours: [ours])
    few, many = (sizes[num_ranks] // 8192 for sizes in (
        all_reduce.MOST_IN_ONE_SHOT, all_reduce.MOST_IN_TWO_SHOTS
    ))  # fmt: skip
    sums = make(size=4096)
    found = [sums.find(rows(number, 4096)) for number in (1, few, few + 1, many, many + 1)]
    assert [None if each is None else each.in_two_shots for each in found] == [
        False, False, True, True, None,
    ]  # fmt: skip
    assert sums.find(rows(1, 4095)) is sums.find(rows(1, 4096, torch.float32)) is None
    odd = make(size=4095)  # which no number of ranks divides
    assert odd.find(rows(few + 1, 4095)) is None and odd.find(rows(few, 4095)) is not None


def test_rows_of_engines() -> None:
    most = all_reduce.MOST_GATHERED[2]
    peers = PeerRows(0, 2, 2048, CPU, lambda ours: [ours])
    for number, is_taken in ((1, True), (most, True), (most + 1, False)):
        tensors = rows(number, 2048), rows(number, 8, torch.int32), rows(number, 8, torch.float32)
        assert (peers.find_gather(tensors) is not None) == is_taken
        assert (peers.find_sums(rows(2 * number, 2048)) is not None) == is_taken
    assert peers.find_gather((rows(1, 2048), rows(1, 1))) is None  # no whole words
    assert peers.find_gather((rows(1, 2048), rows(1, 8192))) is None  # longer than a row's words
