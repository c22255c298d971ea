"""Kernels are chosen for each kind of layers, on GPUs that are not there."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, DecodeRows, PrefillRows, Rotation
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.layer_kinds import LayerKinds
from asyncllm.kernels import balanced_decode
from tests.attention.fake_flashinfer import FakeFlashInfer

BF16, HOPPER, ADA = torch.bfloat16, (9, 0), (8, 9)
FULL = AttentionLayer(0, 32, 8, 128, 128**-0.5)
WINDOW = replace(FULL, window=1024)
ALTERNATING = [replace((WINDOW, FULL)[i % 2], index=i) for i in range(4)]
ALIKE = [replace(FULL, index=i) for i in range(4)]
BY_TRITON = ["rotate 0", "triton None by 0", "rotate 1", "triton None by 0"]


@pytest.mark.parametrize(
    ("layer", "dtype", "block_size", "limit"),
    [
        (FULL, BF16, 16, None),
        (FULL, BF16, 48, None),
        (WINDOW, BF16, 16, "a window of 1024"),
        (FULL, torch.float16, 16, "torch.float16"),
        (replace(FULL, head_dim=256), BF16, 16, "head_dim 256"),
        (replace(FULL, num_kv_heads=2), BF16, 16, "16 query heads of one KV head"),
        (replace(FULL, soft_cap=50.0), BF16, 16, "a soft cap of 50.0"),
        (replace(FULL, sinks=torch.zeros(32)), BF16, 16, "sinks"),
        (FULL, BF16, 8, "block_size 8"),
    ],
)
def test_what_balanced_decode_does_not_do(
    layer: AttentionLayer, dtype: torch.dtype, block_size: int, limit: str | None
) -> None:
    assert balanced_decode.limit(layer, dtype, block_size) == limit
    is_defined = balanced_decode.definitions([layer], dtype, block_size) is not None
    assert is_defined == (limit is None)


def test_layers_are_grouped_by_their_constants() -> None:
    kinds = LayerKinds(ALTERNATING)
    assert kinds.layers == ALTERNATING[:2]
    assert kinds.number_of == {0: 0, 1: 1, 2: 0, 3: 1}
    call = kinds.select(lambda kind, group: lambda layer, x: (kind, group, x))
    assert [call(layer, 5) for layer in ALTERNATING] == [(0, 0, 5), (1, 0, 5)] * 2
    alone = LayerKinds(ALIKE).select(lambda kind, group: call)
    assert alone is call, "nothing between a model of one kind and it"
    grouped = LayerKinds(ALTERNATING, [0, 2, 1, 2])
    call = grouped.select(lambda kind, group: lambda layer: (kind, group))
    assert [call(layer) for layer in ALTERNATING] == [(0, 0), (1, 2), (0, 1), (1, 2)]
    assert sorted(grouped.pairs) == [(0, 0), (0, 1), (1, 2)], "a call for each, once"
    scaled = [FULL, replace(FULL, index=1, scale=1.0)]
    assert len(LayerKinds(scaled).layers) == 2
    capped = [FULL, replace(FULL, index=1, soft_cap=30.0), replace(FULL, index=2, soft_cap=30.0)]
    assert len(LayerKinds(capped).layers) == 2
    sunk = [FULL, *(replace(FULL, index=i, sinks=torch.ones(32)) for i in (1, 2))]
    assert LayerKinds(sunk).number_of == {0: 0, 1: 1, 2: 1}, "whatever their sinks are"


class Balanced:
    """Notes in `launched` what balanced_decode.cu would be launched for."""

    launched: list[str]

    def __init__(self, cache: KVCache, layer: AttentionLayer, launch: Any, num_sms: int) -> None:
        assert layer.window is None

    def decode(self, tables: torch.Tensor, positions: torch.Tensor) -> Any:
        return lambda layer, qkv, rotation: self._note(layer, tables)

    def bind(self, q: Any, tables: Any, positions: Any, out: Any) -> Any:
        return lambda layer: self._note(layer, tables)

    def _note(self, layer: AttentionLayer, tables: torch.Tensor) -> None:
        self.launched.append(f"balanced {layer.index} by {int(tables[0, 0])}")


class Backend:
    """FlashInferAttention on a Hopper that is not there, whose launches are noted in order."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        layers: list[AttentionLayer],
        capability: tuple[int, int] = HOPPER,
        *,
        has_compiler: bool = True,
    ) -> None:
        self.launched: list[str] = []
        self._fake = FakeFlashInfer(monkeypatch)
        self._stub_triton(monkeypatch)
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: capability)
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
        module = importlib.import_module("asyncllm.attention.flashinfer.backend")
        launch = (lambda *args: 0) if has_compiler else None

        def begin_loading(device: torch.device, definitions: Any) -> Any:
            is_supported = capability in balanced_decode.KERNEL.capabilities
            return lambda: launch if is_supported and definitions is not None else None

        kernel = SimpleNamespace(begin_loading=begin_loading)
        declared = SimpleNamespace(KERNEL=kernel, definitions=balanced_decode.definitions)
        monkeypatch.setattr(module, "balanced_decode", declared)
        monkeypatch.setattr(module, "BalancedDecode", Balanced)
        monkeypatch.setattr(module, "PrefillPlan", lambda *args: self)
        monkeypatch.setattr(Balanced, "launched", self.launched, raising=False)
        cache = KVCache(CacheLayout(layers, 16, BF16), 3, torch.device("cpu"))
        self.attention = module.FlashInferAttention(cache, layers)

    def _note(self, name: str) -> Any:
        return lambda layer, *_: self.launched.append(f"{name} {layer.index}")

    def _stub_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def rotate(
            layer: AttentionLayer, qkv: torch.Tensor, *_: Any, **others: Any
        ) -> torch.Tensor:
            self.launched.append(f"rotate {layer.index}")
            return qkv[:, : layer.num_heads]

        def paged_decode(
            q: Any, pages: Any, tables: torch.Tensor, *_: Any, window: int | None, **others: Any
        ) -> None:
            self.launched.append(f"triton {window} by {int(tables[0, 0])}")

        stubs: dict[str, dict[str, Any]] = {
            "rope_kv_write": {"rotate_and_write": rotate},
            "paged_decode": {"paged_decode": paged_decode},
        }
        for name, found in stubs.items():
            stub = ModuleType(f"asyncllm.kernels.{name}.kernel")
            vars(stub).update(found)
            monkeypatch.setitem(sys.modules, stub.__name__, stub)

    # --- as a PrefillPlan ---

    def prepare(self, prefills: PrefillRows) -> None:
        self.launched.append("plan")

    def bind(self, q: torch.Tensor, out: torch.Tensor) -> Any:
        return self._note("prefill")

    # --- steps ---

    def decode(self, layers: list[AttentionLayer], num_rows: int) -> list[str]:
        attend = self.attention.decode(decode_rows(num_rows))
        qkv: Any = torch.zeros(num_rows, 48, 128, dtype=BF16)
        rotation: Any = Rotation(torch.zeros(num_rows, dtype=torch.int32), torch.zeros(1, 128))
        for layer in layers:
            attend(layer, qkv, rotation)
        return self.launched

    def mixed(self, layers: list[AttentionLayer]) -> list[str]:
        arrays = (np.array(values, np.int32) for values in ([0, 3], [3], [0, 1], [[2], [1]]))
        q = torch.zeros(5, 32, 128, dtype=BF16)
        attend = self.attention.mixed(decode_rows(2), PrefillRows(*arrays), q, q.clone())
        for layer in layers:
            attend(layer)
        return self.launched


def decode_rows(num_rows: int) -> DecodeRows:
    """Each group's table holds the group's number."""
    tables = tuple(torch.full((num_rows, 2), group, dtype=torch.int32) for group in range(2))
    return DecodeRows(tables, torch.zeros(num_rows, dtype=torch.int32))


def test_windows_beside_full_attention_run_by_kernels_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend(monkeypatch, ALTERNATING)
    assert backend.decode(ALTERNATING[:2], 4) == ["rotate 0", "triton 1024 by 0", "balanced 1 by 1"]
    backend.launched.clear()
    assert backend.mixed(ALTERNATING[:2]) == [
        "plan", "triton 1024 by 0", "prefill 0", "balanced 1 by 1", "prefill 1",
    ]  # fmt: skip
    assert backend.attention.step_attention(64) is None, "whole steps are FA3's, without windows"


@pytest.mark.parametrize(
    ("num_rows", "capability", "has_compiler", "expected"),
    [
        (1, HOPPER, True, ["balanced 0 by 0", "balanced 1 by 0"]),
        (4, HOPPER, True, ["balanced 0 by 0", "balanced 1 by 0"]),
        (2049, HOPPER, True, BY_TRITON),
        (4, HOPPER, False, BY_TRITON),
        (4, ADA, True, BY_TRITON),
    ],
)
def test_layers_that_are_alike_run_by_one_kernel(
    num_rows: int,
    capability: tuple[int, int],
    has_compiler: bool,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend(monkeypatch, ALIKE, capability, has_compiler=has_compiler)
    assert backend.decode(ALIKE[:2], num_rows) == expected


def test_what_no_prefill_kernel_does_is_refused_for_any_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = [*ALIKE[:3], replace(FULL, index=3, head_dim=80)]
    with pytest.raises(ValueError, match="cannot prefill head_dim 80"):
        Backend(monkeypatch, odd)
