"""Slots' rows for a decode step against torch; skipped where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

from asyncllm.worker.device_state import DeviceState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def penalise_some(state: DeviceState) -> None:
    """Every other slot, in one way or another; the padding slot as nobody set it."""
    for penalties, first in (
        (state.presence_penalties, 2),
        (state.frequency_penalties, 4),
        (state.repetition_penalties, 6),
    ):
        penalties[first::6] = -0.5 if first < 6 else 1.2
    state.repetition_penalties[1:].clamp_(min=1)


@pytest.mark.parametrize("rows", [1, 8, 100])
def test_rows_of_slots_equal_torch(rows: int) -> None:
    from asyncllm.kernels.slots.kernel import gather_slots_triton
    from asyncllm.worker.device_state import gather_slots_torch

    state = DeviceState(128, 1500, 5000, CUDA, num_groups=2)
    state.last_tokens.copy_(torch.randint(0, 5000, (128,), device=CUDA))
    state.positions.copy_(torch.randint(0, 9999, (128,), device=CUDA))
    state.block_tables.copy_(torch.randint(0, 99, (2, 128, 1500), device=CUDA))
    penalise_some(state)
    slots = torch.randperm(128, device=CUDA)[:rows].int()
    ours = gather_slots_triton(state, slots)
    counted = state.output_counts.clone()
    state.output_counts.zero_()
    expected = gather_slots_torch(state, slots)
    assert torch.equal(counted, state.output_counts)
    (*our_vectors, our_rows), (*vectors, rows) = ours, expected
    our_vectors += [our_rows.positions, *our_rows.block_tables]
    vectors += [rows.positions, *rows.block_tables]
    assert [torch.equal(*pair) for pair in zip(our_vectors, vectors, strict=True)] == [True] * 5
