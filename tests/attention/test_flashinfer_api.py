"""FlashInfer's names are imported in one file, which falls back where they are not as tested."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.layer_kinds import LayerKinds
from asyncllm.attention.registry import import_backend
from tests.attention.fake_flashinfer import FakeFlashInfer, import_anew
from tests.caches import uniform_cache

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "attention" / "flashinfer"
LAYERS = [AttentionLayer(i, 8, 2, 64, 0.125, window) for i, window in enumerate((None, 30, None))]


def import_ours(name: str) -> Any:
    return importlib.import_module(f"asyncllm.attention.flashinfer.{name}")


def importers(prefix: str) -> set[Path]:
    """Our files that import a module of this name or below it, wherever in the file."""
    found = set()
    for folder in ("asyncllm", "attention", "graphs", "models", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                if any(f"{name}.".startswith(f"{prefix}.") for name in names):
                    found.add(file)
    return found


@pytest.mark.slow
def test_these_files_and_no_others_know_flashinfer() -> None:
    assert importers("flashinfer") == {PACKAGE / "api.py"}
    users = {PACKAGE / f"{name}.py" for name in ("backend", "modules", "prefill")}
    assert importers("asyncllm.attention.flashinfer.api") == users


def test_the_tested_version_is_named_once() -> None:
    files = [*(ROOT / "attention").rglob("*.py"), *(ROOT / "asyncllm").rglob("*.py")]
    assert [file for file in files if "TESTED_VERSION =" in file.read_text()] == [
        PACKAGE / "api.py"
    ]


def test_as_tested_its_modules_are_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake, api = FakeFlashInfer(monkeypatch), import_ours("api")
    assert api.get_batch_prefill_module == fake._get_prefill_module
    assert not caplog.records


@pytest.mark.parametrize(
    ("version", "without", "reason"),
    [
        ("0.7.0", [], "it is version 0.7.0, 0.6.12 was tested"),
        ("0.6.12", [(".prefill", "get_batch_prefill_module")], "get_batch_prefill_module"),
    ],
)
def test_otherwise_its_public_calls_are_made(
    version: str,
    without: list[tuple[str, str]],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    FakeFlashInfer(monkeypatch, version, without)
    api = import_ours("api")
    assert api.get_batch_prefill_module is None
    assert "public calls" in caplog.text and reason in caplog.text
    assert api.jit is not None, "any version's compiler is listed"


@pytest.mark.parametrize("version", ["0.6.12", "0.7.0"])
def test_prefills_are_planned_for_each_kind_of_layers(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention by FA3, a window by FA2: as modules where they are as tested."""
    fake, prefill = FakeFlashInfer(monkeypatch, version), import_ours("prefill")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    cache = uniform_cache(
        num_layers=3, num_pages=5, block_size=16, num_kv_heads=2, head_dim=64,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    plan = prefill.PrefillPlan(LayerKinds(LAYERS), cache, torch.zeros(8, dtype=torch.uint8))
    backends = [args[0] for args in fake.prefills]
    assert (backends, fake.wrappers)[version != "0.6.12"] == ["fa3", "fa2"]
    assert len(plan._kernels) == len(backends) + len(fake.wrappers) == 2


@pytest.mark.parametrize(("head_dim", "expected"), [(64, "fa3"), (128, "fa3"), (256, "fa2")])
def test_large_heads_are_prefilled_by_fa2(
    head_dim: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeFlashInfer(monkeypatch)
    layer = AttentionLayer(0, 8, 2, head_dim, 0.125, None)
    assert import_ours("prefill").prefill_backend((9, 0), layer) == expected


HOPPER, AMPERE, LEAST = (9, 0), (8, 0), 128 << 20


@pytest.mark.parametrize(
    ("heads", "capability", "num_sms", "is_fp8", "expected"),
    [  # query heads, KV heads, head_dim, window; of FA2: its tiles' outputs, and log-sum-exps
        ((16, 2, 256, None), HOPPER, 132, False, 138_412_032 + 540_672 + 32),  # Qwen3-Next
        ((8, 4, 256, 1024), HOPPER, 132, False, LEAST),
        ((64, 8, 128, None), HOPPER, 132, False, LEAST),  # by FA3
        ((64, 8, 128, None), HOPPER, 132, True, 138_412_032 + 1_081_344 + 32),
        ((64, 8, 128, 4096), HOPPER, 132, False, 138_412_032 + 1_081_344 + 32),
        ((64, 8, 128, None), AMPERE, 108, False, LEAST),
        ((128, 8, 128, None), AMPERE, 108, False, 226_492_416 + 1_769_472 + 32),
    ],
)
def test_the_workspace_holds_the_most_tiles_that_fa2_splits_kv_into(
    heads: tuple[int, int, int, int | None],
    capability: tuple[int, int],
    num_sms: int,
    is_fp8: bool,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeFlashInfer(monkeypatch)
    split_bytes = import_ours("prefill").split_bytes
    layer = AttentionLayer(0, *heads[:3], 0.125, heads[3])
    assert split_bytes([layer], capability, num_sms, is_fp8) == expected
    small = AttentionLayer(1, 2, 2, 64, 0.125, 30)
    assert split_bytes([small, layer, small], capability, num_sms, is_fp8) == expected


def test_a_compilation_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "asyncllm")
    fake = FakeFlashInfer(monkeypatch)
    modules = import_ours("modules")
    assert modules.used_modules() == {"loaded"} and str(modules.cache_folder()).endswith("infer")
    needed = modules.modules_for(LAYERS, torch.bfloat16, (9, 0))
    assert [module.name for module in needed] == ["fa3-False", "fa2-True"]
    assert needed[0].build()._spec.builds == 1
    assert "compiling the FlashInfer kernels fa3-False" in caplog.text
    caplog.clear()
    monkeypatch.setattr(fake.spec, "is_compiled", True)
    needed[0].build()
    assert not caplog.text


@pytest.mark.parametrize("name", [(".jit.core", "JitSpec"), (".jit", "gen_batch_prefill_module")])
def test_a_compiler_that_is_another_lists_nothing(
    name: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeFlashInfer(monkeypatch, without=[name])
    api, modules = import_ours("api"), import_ours("modules")
    assert api.jit is None and api.get_batch_prefill_module is not None
    assert "unannounced and unlisted" in caplog.text and name[1] in caplog.text
    assert not modules.modules_for(LAYERS, torch.bfloat16, (9, 0))
    assert not modules.used_modules() and modules.cache_folder() is None


def broken_package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "flashinfer").mkdir()
    (folder / "flashinfer" / "__init__.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    import_anew(monkeypatch)


@pytest.mark.parametrize("fault", ["no driver", "BatchPrefillWithPagedKVCacheWrapper"])
def test_auto_takes_the_next_backend_and_says_why(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "no driver":
        broken_package(monkeypatch, tmp_path)
    else:
        FakeFlashInfer(monkeypatch, without=[(".prefill", fault)])
    assert import_backend("flashinfer", or_torch=True) == "torch"
    assert "falling back to attention_backend torch" in caplog.text and fault in caplog.text
    with pytest.raises(ValueError, match=f"attention_backend flashinfer: .*{fault}"):
        import_backend("flashinfer")
