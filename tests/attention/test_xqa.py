"""XQA's module gets what the public call would pass it; FlashInfer itself is a stand-in here."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from asyncllm.attention.base import AttentionLayer
from tests.attention.fake_flashinfer import FakeFlashInfer
from tests.caches import uniform_cache

LAYERS = [AttentionLayer(0, 8, 2, 64, 0.125), AttentionLayer(1, 8, 2, 64, 0.25, window=30)]


def bound(version: str, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeFlashInfer, Any, Any]:
    fake = FakeFlashInfer(monkeypatch, version)
    module = importlib.import_module("asyncllm.attention.flashinfer.xqa")
    cache = uniform_cache(
        num_layers=len(LAYERS), num_pages=5, block_size=16, num_kv_heads=2, head_dim=64,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    xqa = module.Xqa(cache, torch.zeros(8, dtype=torch.uint8), 132)
    rows = torch.zeros(3, 8, 64, dtype=torch.bfloat16)
    lengths = torch.ones(3, 1, dtype=torch.uint32)
    call = xqa.bind(rows, torch.zeros(3, 7, dtype=torch.int32), lengths, torch.empty_like(rows))
    return fake, cache, call


def test_the_module_is_called_per_layer_and_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, cache, call = bound("0.6.12", monkeypatch)
    for layer in [*LAYERS, *LAYERS]:
        call(layer)
    assert [args[5] for args in fake.modules] == [False, True], "one for each kind of window"
    assert fake.modules[0] == (*[torch.bfloat16] * 2, 16, 64, 4, False, torch.bfloat16, 1)
    plain, windowed = fake.calls[:2]
    assert (plain["sliding_win_size"], windowed["sliding_win_size"]) == (0, 30)
    assert (plain["q_scale"], windowed["q_scale"]) == (1.0, 2.0), "times sqrt(head_dim)"
    assert plain["q"].shape == plain["output"].shape == (3, 1, 8, 64)
    assert (plain["batch_size"], plain["max_seq_len"], plain["num_kv_heads"]) == (3, 7 * 16, 2)
    for entry, keys_values in zip(fake.calls[:2], cache.layers, strict=True):
        assert entry["k_cache"].data_ptr() == keys_values[:, 0].data_ptr()
        assert entry["v_cache"].data_ptr() == keys_values[:, 1].data_ptr()
    assert not fake.public


def test_another_version_is_called_by_its_public_face(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, _, call = bound("0.7.0", monkeypatch)
    for layer in LAYERS:
        call(layer)
    assert [entry["sliding_win_size"] for entry in fake.public] == [0, 30]
    assert not fake.modules and not fake.calls
