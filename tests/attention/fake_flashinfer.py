"""FlashInfer as tests put it into `sys.modules`: its names in 0.6.12, and notes of their calls."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

OURS = ["", ".api", ".backend", ".modules", ".prefill", ".whole_steps", ".xqa"]
# XQA's compiled function in 0.6.12, by its source.
PARAMETERS = [
    "run_sm90_fp8_mha", "sm_count", "num_kv_heads", "sliding_win_size", "q_scale", "output",
    "rcp_out_scale", "q", "sinks", "k_cache", "v_cache", "key_sf", "value_sf", "page_table",
    "max_seq_len", "seq_lens", "batch_size", "kv_scale", "semaphores", "workspace_buffer",
    "enable_pdl", "q_seq_len", "mask",
]  # fmt: skip


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
        self.modules: list[tuple[Any, ...]] = []  # arguments of get_xqa_module
        self.calls: list[dict[str, Any]] = []  # of XQA's compiled function
        self.public: list[dict[str, Any]] = []  # of the public function
        self.prefills: list[tuple[Any, ...]] = []  # arguments of get_batch_prefill_module
        self.wrappers: list[str] = []  # backends of the public wrappers
        self.spec = type("JitSpec", (JitSpec,), {})  # to be patched by nobody else
        names: dict[str, dict[str, Any]] = {
            "": {"__version__": version},
            ".prefill": {
                "BatchPrefillWithPagedKVCacheWrapper": self._make_wrapper,
                "get_batch_prefill_module": self._get_prefill_module,
            },
            ".xqa": {"xqa": self._call_public, "get_xqa_module": self._get_xqa_module},
            ".jit": {
                "env": SimpleNamespace(FLASHINFER_JIT_DIR="/cache/flashinfer"),
                "gen_batch_prefill_module": lambda *args: self.spec(f"{args[0]}-{args[8]}"),
            },
            ".jit.core": {
                "JitSpec": self.spec,
                "jit_spec_registry": SimpleNamespace(get_all_specs=lambda: {"loaded": None}),
            },
            ".jit.xqa": {"gen_xqa_module": lambda *args: self.spec(f"xqa-{args[5]}")},
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

    def _get_xqa_module(self, *args: Any) -> SimpleNamespace:
        self.modules.append(args)
        return SimpleNamespace(xqa=self._run_xqa)

    def _run_xqa(self, *args: Any) -> None:
        self.calls.append(dict(zip(PARAMETERS, args, strict=True)))

    def _call_public(self, q: torch.Tensor, *args: Any, **options: Any) -> None:
        self.public.append({"q": q, "args": args, **options})


def import_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget our modules that import FlashInfer; after the test they are as before."""
    for suffix in OURS:
        name = f"asyncllm.attention.flashinfer{suffix}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]
