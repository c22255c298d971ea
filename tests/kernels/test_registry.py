"""Which of our CUDA sources a model needs on a card, and whether they are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.attention import cuda_source
from asyncllm.cache_folder import cache_folder
from asyncllm.engine_args import EngineArgs
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.registry import build_model
from asyncllm.worker import own_kernels

CUDA = torch.device("cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A card that is not there, with a compiler."""
    card = SimpleNamespace(capability=(9, 0), num_sms=132, compiler="/bin/true")
    sms = SimpleNamespace
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: card.capability)
    monkeypatch.setattr(
        cuda, "get_device_properties", lambda device: sms(multi_processor_count=card.num_sms)
    )
    # Not installed without CUDA: Triton, which those of products import, and FlashInfer.
    monkeypatch.setattr(own_kernels, "_product_kernels", lambda config, device: [])
    monkeypatch.setattr(own_kernels, "resolve_backend", lambda name, device: _resolved(name))
    monkeypatch.setattr(cuda_source, "find_compiler", lambda: card.compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return card


def _resolved(name: str) -> str:
    return "flashinfer" if name == "auto" else name


def needed(**args: Any) -> list[Any]:
    config = EngineArgs("tiny", **{"dtype": "bfloat16", **args}).create_engine_config()
    dtype = getattr(torch, config.dtype)
    model = build_model(config.model, dtype, torch.device("meta"), TorchOps(), 16)
    return list(own_kernels.own_kernels(config, model, CUDA))


def stems(kernels: list[Any]) -> list[str]:
    return [kernel.source.stem for kernel in kernels]


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
def test_by_configuration(card: SimpleNamespace, args: dict[str, Any], expected: list[str]) -> None:
    assert stems(needed(**args)) == expected


def test_by_card(card: SimpleNamespace) -> None:
    card.capability = (8, 0)
    assert needed() == []
    card.capability = (12, 0)  # less shared memory
    assert needed() == []
    card.capability = (10, 0)  # no FA3
    assert stems(needed()) == [ALL[0], ALL[2]]
    card.capability, card.num_sms = (9, 0), 600  # the tiny vocabulary is 512 times 8
    assert stems(needed()) == ALL[:2]


def test_built_and_missing(card: SimpleNamespace, tmp_path: Path) -> None:
    kernels = needed()
    assert len({kernel.name for kernel in kernels}) == 3
    assert not any(kernel.is_built for kernel in kernels)
    folder = cache_folder()
    folder.mkdir(parents=True)
    (folder / f"{kernels[1].name}.so").touch()
    assert [kernel.is_built for kernel in kernels] == [False, True, False]
    card.compiler = None
    assert needed() == [kernels[1]]  # the others never will be


def test_a_start_begins_with_all_of_them(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_source, "begin_loading", lambda *args: begun.append(args))
    config = EngineArgs("tiny", dtype="bfloat16").create_engine_config()
    own_kernels.begin_building(config, CUDA)
    assert begun == [(k.source, k.capability, k.definitions) for k in needed()]


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def _not_ours() -> Path:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("folder", [_no_home, _not_ours])
def test_a_start_without_compiler_and_cache(
    folder: Callable[[], Path], card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.compiler = None
    monkeypatch.setattr(cuda_source, "cache_folder", folder)
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_source, "begin_loading", lambda *args: begun.append(args))
    config = EngineArgs("tiny", dtype="bfloat16").create_engine_config()
    own_kernels.begin_building(config, CUDA)
    assert not begun
