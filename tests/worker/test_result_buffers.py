"""Buffers of sampled tokens: never written to before they were read, and used again after."""

from __future__ import annotations

import torch

from asyncllm.worker.staging import ResultBuffers


class Unpinned(ResultBuffers):
    """As on CUDA, but for the pinning, which needs a device."""

    num_allocated = 0

    def _allocate(self) -> torch.Tensor:
        self.num_allocated += 1
        return torch.empty(self._capacity, dtype=torch.int32)


def tokens(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def test_steps_in_flight_do_not_share_a_buffer() -> None:
    buffers = Unpinned(4, torch.device("cuda"))
    reads = [buffers.fetch(tokens(i, i + 1), 2) for i in range(3)]
    assert [read() for read in reads] == [[0, 1], [1, 2], [2, 3]]


def test_buffers_are_used_again() -> None:
    buffers = Unpinned(4, torch.device("cuda"))
    before = buffers.fetch(tokens(0), 1)
    for i in range(1, 10):  # one step ahead
        after = buffers.fetch(tokens(i), 1)
        assert before() == [i - 1]
        before = after
    assert buffers.num_allocated == 2


def test_a_step_that_is_never_read_costs_its_buffer() -> None:
    buffers = Unpinned(4, torch.device("cuda"))
    lost = buffers.fetch(tokens(1), 1)
    assert buffers.fetch(tokens(2, 3), 2)() == [2, 3]
    assert lost() == [1]


def test_on_the_cpu_nothing_is_copied() -> None:
    assert ResultBuffers(4, torch.device("cpu")).fetch(tokens(5, 6), 2)() == [5, 6]


def test_padding_is_no_token() -> None:
    for device in ("cuda", "cpu"):
        assert Unpinned(4, torch.device(device)).fetch(tokens(5, 6, 0), 2)() == [5, 6]
