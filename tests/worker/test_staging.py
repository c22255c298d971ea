"""Arrays packed into one copy: what comes out is what went in, aligned, whatever the types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.worker.staging import ALIGNMENT_BYTES, Staging, Twins


def test_what_comes_out_is_what_went_in() -> None:
    rng = np.random.default_rng(0)
    twins = Twins(torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8))
    for _ in range(50):
        shapes = [(1,), (2, 3), (0,), (5,), (7,), (1, 4), (16,), (3, 0)]
        arrays = {
            f"a{i}": rng.integers(0, 1 << 30, shape).astype(dtype)
            for i, (shape, dtype) in enumerate(
                zip(shapes, rng.choice(["int32", "int64", "float32"], len(shapes)), strict=True)
            )
        }
        tensors = twins.copy(arrays)
        assert tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            assert tensors[name].numpy().dtype == array.dtype
            np.testing.assert_array_equal(tensors[name].numpy(), array)
            if array.size:  # kernels are compiled for aligned pointers
                assert tensors[name].data_ptr() % ALIGNMENT_BYTES == 0


def test_a_type_that_no_step_has_is_an_error() -> None:
    twins = Twins(torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="type"):
        twins.copy({"a": np.zeros(3)})


def test_nothing_is_uploaded_where_nothing_changed() -> None:
    assert Staging(torch.device("cpu")).upload({}) == {}
