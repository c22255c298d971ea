"""FlashInfer as tests put it into `sys.modules`: its names in 0.6.12, and notes of their calls."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

OURS = ["", ".api", ".backend", ".modules", ".prefill", ".whole_steps"]


class JitSpec:
    """One of FlashInfer's modules, which counts how often it is compiled."""

    is_compiled = False

    def __init__(self, name: str) -> None:
        self.name, self.builds = name, 0

    def build(self, verbose: bool) -> None:
        self.builds += 1


class FakeFlashInfer:
    """Our modules that import FlashInfer are imported anew, by this test alone."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        version: str = "0.6.12",
        without: Collection[tuple[str, str]] = (),
    ) -> None:
        """without: (module, name) of what this FlashInfer lacks."""
        self.prefills: list[tuple[Any, ...]] = []  # arguments of get_batch_prefill_module
        self.wrappers: list[str] = []  # backends of the public wrappers
        self.spec = type("JitSpec", (JitSpec,), {})  # to be patched by nobody else
        names: dict[str, dict[str, Any]] = {
            "": {"__version__": version},
            ".prefill": {
                "BatchPrefillWithPagedKVCacheWrapper": self._make_wrapper,
                "get_batch_prefill_module": self._get_prefill_module,
            },
            ".jit": {
                "env": SimpleNamespace(FLASHINFER_JIT_DIR="/cache/flashinfer"),
                "gen_batch_prefill_module": lambda *args: self.spec(f"{args[0]}-{args[8]}"),
            },
            ".jit.core": {
                "JitSpec": self.spec,
                "jit_spec_registry": SimpleNamespace(get_all_specs=lambda: {"loaded": None}),
            },
        }
        for module, name in without:
            del names[module][name]
        for suffix, found in names.items():
            module = ModuleType(f"flashinfer{suffix}")
            vars(module).update(found)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        import_anew(monkeypatch)

    def _get_prefill_module(self, *args: Any) -> SimpleNamespace:
        self.prefills.append(args)
        return SimpleNamespace(plan=lambda *_: [0], paged_run=lambda *_: None)

    def _make_wrapper(self, workspace: torch.Tensor, layout: str, backend: str) -> object:
        self.wrappers.append(backend)
        return object()


def import_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget our modules that import FlashInfer; after the test they are as before."""
    for suffix in OURS:
        name = f"asyncllm.attention.flashinfer{suffix}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]
