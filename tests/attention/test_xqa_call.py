"""XQA's module gets what the public call would pass it; FlashInfer itself is a stand-in here."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.attention.base import AttentionLayer

# The compiled module's function in FlashInfer 0.6.12, by its source.
PARAMETERS = [
    "run_sm90_fp8_mha", "sm_count", "num_kv_heads", "sliding_win_size", "q_scale", "output",
    "rcp_out_scale", "q", "sinks", "k_cache", "v_cache", "key_sf", "value_sf", "page_table",
    "max_seq_len", "seq_lens", "batch_size", "kv_scale", "semaphores", "workspace_buffer",
    "enable_pdl", "q_seq_len", "mask",
]  # fmt: skip
LAYERS = [AttentionLayer(0, 8, 2, 64, 0.125), AttentionLayer(1, 8, 2, 64, 0.25, window=30)]


class FlashInfer:
    """Notes the calls of its modules and of its public function."""

    def __init__(self, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modules: list[tuple[Any, ...]] = []
        self.calls: list[dict[str, Any]] = []
        self.public: list[dict[str, Any]] = []
        package: Any = ModuleType("flashinfer")
        package.__version__ = version
        xqa: Any = ModuleType("flashinfer.xqa")
        xqa.get_xqa_module = self.get_module
        ours: Any = ModuleType("asyncllm.attention.flashinfer_import")
        ours.flashinfer, ours.xqa = package, self.call_public
        for module in (package, xqa, ours):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def get_module(self, *args: Any) -> SimpleNamespace:
        self.modules.append(args)
        return SimpleNamespace(xqa=self.run)

    def run(self, *args: Any) -> None:
        self.calls.append(dict(zip(PARAMETERS, args, strict=True)))

    def call_public(self, q: torch.Tensor, *args: Any, **options: Any) -> None:
        self.public.append({"q": q, "args": args, **options})


def bound(version: str, monkeypatch: pytest.MonkeyPatch) -> tuple[FlashInfer, Any, Any]:
    fake = FlashInfer(version, monkeypatch)
    found = importlib.util.find_spec("asyncllm.attention.xqa_call")
    assert found is not None and found.loader is not None
    xqa_call = importlib.util.module_from_spec(found)  # one of this test's own
    found.loader.exec_module(xqa_call)
    cache: Any = SimpleNamespace(
        layers=[torch.zeros(5, 2, 16, 2, 64, dtype=torch.bfloat16) for _ in LAYERS], block_size=16
    )
    xqa = xqa_call.Xqa(cache, torch.zeros(8, dtype=torch.uint8), 132)
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
