"""Arrays packed into one copy: what comes out is what went in, aligned, whatever the types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.worker.packed_step import LogitEdits, SamplingExtras
from asyncllm.worker.staging import Staging


def test_what_comes_out_is_what_went_in() -> None:
    rng = np.random.default_rng(0)
    staging = Staging(torch.device("cpu"), 16)  # which grows
    for _ in range(50):
        shapes = [(1,), (2, 3), (0,), (5,), (7,), (1, 4), (16,), (3, 0)]
        dtypes = rng.choice(["int32", "float32"], len(shapes))
        arrays = [
            rng.integers(0, 1 << 30, shape).astype(dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        for array, tensor in zip(arrays, staging.upload(tuple(arrays)), strict=True):
            assert tensor.numpy().dtype == array.dtype
            np.testing.assert_array_equal(tensor.numpy(), array)
            if array.size:  # kernels are compiled for aligned pointers
                assert tensor.data_ptr() % 16 == 0


def test_a_type_that_no_step_has_is_an_error() -> None:
    staging = Staging(torch.device("cpu"), 64)
    with pytest.raises(AssertionError, match="type"):
        staging.upload((np.zeros(3, np.int64),))


def test_records_come_back_with_tensors_in_their_places() -> None:
    edits = LogitEdits(*(np.arange(i, i + 3, dtype=np.int32) for i in range(5)))
    extras = SamplingExtras(edits=edits, prompt_targets=np.array([7, 8], np.int32))
    uploaded = Staging(torch.device("cpu")).upload(extras)
    assert isinstance(uploaded, SamplingExtras) and isinstance(uploaded.edits, LogitEdits)
    for array, tensor in zip(edits, uploaded.edits, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert uploaded.prompt_targets.tolist() == [7, 8]
    assert uploaded.prompt_tokens is uploaded.allowed is uploaded.logprob_ids is None
