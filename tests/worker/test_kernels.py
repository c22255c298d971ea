"""When products are chosen, and when they are torch's own."""

from __future__ import annotations

import pytest
import torch

from asyncllm import LLM
from asyncllm.kernels.gemm.gemm_autotune import Agree
from asyncllm.models.layers.ops import Ops
from asyncllm.worker import kernels


def sizes_asked_for(monkeypatch: pytest.MonkeyPatch, *, enforce_eager: bool) -> set[int]:
    asked: list[set[int]] = []
    select = kernels.select_ops

    def note(device: torch.device, dtype: torch.dtype, sizes: set[int], agree: Agree | None) -> Ops:
        asked.append(sizes)
        return select(device, dtype, sizes, agree)

    monkeypatch.setattr("asyncllm.worker.worker.select_ops", note)
    args = {"cuda_graph_sizes": [2, 4], "prefill_graph_sizes": [4, 8]}
    with LLM("tiny", **args, enforce_eager=enforce_eager, num_gpu_blocks_override=8, swap_space=0):
        return asked[0]


def test_products_are_chosen_for_captured_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes_asked_for(monkeypatch, enforce_eager=False) == {2, 4, 8}
    assert sizes_asked_for(monkeypatch, enforce_eager=True) == set()


def test_where_nothing_is_captured_no_library_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("32 MiB of workspace for nothing")

    monkeypatch.setattr(kernels, "CublasLt", fail)
    assert kernels._select_gemm(torch.device("cpu"), torch.bfloat16, set(), None) is None
