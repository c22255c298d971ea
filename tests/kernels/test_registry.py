"""Which of our CUDA sources a model needs on a GPU, and whether they are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.config import EngineArgs
from asyncllm.host import cache_folder
from asyncllm.kernels import nvcc, registry
from asyncllm.kernels.nvcc import Library
from asyncllm.worker import kernel_prewarm
from asyncllm.worker.kernel_prewarm import KernelPrewarm, early_start

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A GPU that is not there, with a compiler."""
    gpu = SimpleNamespace(capability=(9, 0), num_sms=132, compiler="/bin/true")
    sms = SimpleNamespace
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: gpu.capability)
    monkeypatch.setattr(
        cuda, "get_device_properties", lambda device: sms(multi_processor_count=gpu.num_sms)
    )
    # FlashInfer is not installed without CUDA.
    monkeypatch.setattr(kernel_prewarm, "has_fast_ops", lambda device, dtype: True)
    monkeypatch.setattr(
        kernel_prewarm, "resolve_backend", lambda name, device, is_fp8: _resolved(name)
    )
    monkeypatch.setattr(nvcc, "find_compiler", lambda: gpu.compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return gpu


def _resolved(name: str) -> str:
    return "flashinfer" if name == "auto" else name


def needed(**args: Any) -> list[Any]:
    config = EngineArgs("tiny", **{"dtype": "bfloat16", **args}).create_engine_config()
    return list(registry.libraries(early_start(config, CUDA)))


def stems(kernels: list[Any]) -> list[str]:
    return [kernel.source.stem for kernel in kernels]


SKINNY = "skinny_gemm"  # for any model
ALL = ["balanced_decode", "prefill_lists", "persistent_decode"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, ALL),
        ({"enforce_eager": True}, ALL[:1]),
        ({"prefill_graph_sizes": [0]}, [ALL[0], ALL[2]]),
        ({"cuda_graph_sizes": [16, 256]}, ALL[:2]),
        ({"cuda_graph_sizes": [8, 256]}, ALL),
        ({"attention_backend": "flashinfer"}, ALL[:2]),
        ({"attention_backend": "torch"}, []),
        ({"dtype": "float16"}, []),
        ({"block_size": 8}, ALL[2:]),
    ],
)
def test_by_configuration(gpu: SimpleNamespace, args: dict[str, Any], expected: list[str]) -> None:
    assert stems(needed(**args)) == [SKINNY, *expected]


def test_by_gpu(gpu: SimpleNamespace) -> None:
    gpu.capability = (8, 0)
    assert needed() == []
    gpu.capability = (12, 0)  # less shared memory
    assert needed() == []
    gpu.capability = (10, 0)  # no FA3
    assert stems(needed()) == [SKINNY, ALL[0], ALL[2]]
    gpu.capability, gpu.num_sms = (9, 0), 600  # the tiny vocabulary is 512 times 8
    assert stems(needed()) == [SKINNY, *ALL[:2]]


def test_built_and_missing(gpu: SimpleNamespace, tmp_path: Path) -> None:
    kernels = needed()
    assert len({kernel.name for kernel in kernels}) == 4
    assert not any(kernel.is_built for kernel in kernels)
    folder = cache_folder()
    folder.mkdir(parents=True)
    (folder / f"{kernels[1].name}.so").touch()
    assert [kernel.is_built for kernel in kernels] == [False, True, False, False]
    gpu.compiler = None
    assert needed() == [kernels[1]]  # the others never will be


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Library]:
    """Libraries that a start has begun to compile; it launches nothing."""
    begun: list[Library] = []
    monkeypatch.setattr(Library, "begin_loading", lambda library: begun.append(library))
    monkeypatch.setattr(registry, "prewarm_launches", lambda start: [])
    return begun


def test_a_start_begins_with_all_of_them(gpu: SimpleNamespace, begun: list[Library]) -> None:
    KernelPrewarm(CUDA).begin_all(EngineArgs("tiny", dtype="bfloat16").create_engine_config())
    assert begun == needed() and len(begun) == 4


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def _not_ours() -> Path:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("folder", [_no_home, _not_ours])
def test_a_start_without_compiler_and_cache(
    folder: Callable[[], Path],
    gpu: SimpleNamespace,
    begun: list[Library],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu.compiler = None
    monkeypatch.setattr(nvcc, "cache_folder", folder)
    KernelPrewarm(CUDA).begin_all(EngineArgs("tiny", dtype="bfloat16").create_engine_config())
    assert not begun


def test_a_kernel_is_its_folder() -> None:
    folder = Path(registry.__file__).parent
    assert {kernel.source for kernel in registry.CUDA_KERNELS} == {*folder.rglob("*.cu")}
    for kernel in registry.CUDA_KERNELS:
        assert kernel.source == folder / kernel.name / f"{kernel.name}.cu"
        assert f"asyncllm_{kernel.name}(" in kernel.source.read_text()
