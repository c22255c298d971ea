"""What is launched early runs in threads, in each way that steps sample, and raises at the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch

from asyncllm.engine_args import EngineArgs
from asyncllm.models.layers.ops import Norm, Normed
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.early_launches import MANY_ROWS, EarlyLaunches
from asyncllm.worker.kernels import select_slot_kernels
from asyncllm.worker.token_masks import RowMasks
from tests.waiting import PATIENCE_SECONDS

CUDA = torch.device("cuda")  # that no launch here asks for
CPU = torch.device("cpu")
VOCAB = 70


def test_launches_run_side_by_side() -> None:
    early = EarlyLaunches(CUDA)
    both = threading.Barrier(2)
    for _ in range(2):
        early.begin(lambda: both.wait(PATIENCE_SECONDS))
    early.wait()
    assert not [t for t in threading.enumerate() if t.name.startswith("asyncllm-early")]


def test_one_thread_hashes_the_compiler_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    @cache
    def triton_key() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        events.append("hashed")

    module = ModuleType("triton.runtime.cache")
    monkeypatch.setattr(module, "triton_key", triton_key, raising=False)
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    early = EarlyLaunches(CUDA)
    for _ in range(3):
        early.begin(lambda: events.append("launched"))
    assert begun.wait(PATIENCE_SECONDS)
    threading.Timer(0.05, go_on.set).start()
    early.wait_for_hash()
    assert events[0] == "hashed"
    early.wait()
    assert events == ["hashed", *["launched"] * 3]


def test_a_launch_is_inference() -> None:
    modes: list[bool] = []
    early = EarlyLaunches(CUDA)
    early.begin(lambda: modes.append(torch.is_inference_mode_enabled()))
    early.wait()
    assert modes == [True]


def test_what_a_launch_raises_is_raised_after_all_have_ended() -> None:
    done: list[int] = []
    release = threading.Event()

    def fail() -> None:
        raise RuntimeError("no compiler")

    def slow() -> None:
        release.wait(PATIENCE_SECONDS)
        done.append(1)

    early = EarlyLaunches(CUDA)
    early.begin(fail)
    early.begin(slow)
    threading.Timer(0.05, release.set).start()
    with pytest.raises(RuntimeError, match="no compiler"):
        early.wait()
    assert done == [1]


def test_a_cpu_launches_nothing() -> None:
    early = EarlyLaunches(CPU)
    early.begin(lambda: pytest.fail("launched"))
    early.wait()


class AtOnce(EarlyLaunches):
    """Launches here and now, on the CPU."""

    def begin(self, launch: Callable[[], object], stream: torch.cuda.Stream | None = None) -> None:
        launch()


def test_slots_are_read_and_written() -> None:
    kernels = select_slot_kernels(CPU)
    asked: list[str] = []

    def watch(name: str) -> Callable[..., object]:
        def kernel(*args: object) -> object:
            asked.append(name)
            return getattr(kernels, name)(*args)

        return kernel

    names = ("gather_slots", "fill_decodes", "write_slots")
    AtOnce(CPU).begin_slots(replace(kernels, **{name: watch(name) for name in names}), 16)
    assert asked == list(names)


class RecordedOps(TorchOps):
    """What kernels after products of many rows are given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        self._record("rms_norm", x)
        return super().rms_norm(x, norm)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        self._record("swiglu", x)
        return super().swiglu(x)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> Normed:
        self._record("add_rms_norm", x)
        return super().add_rms_norm(x, residual, norm)

    def _record(self, name: str, x: torch.Tensor) -> None:
        self.given.append((name, tuple(x.shape), x.dtype))


def test_what_is_between_products_has_the_model_sizes() -> None:
    ops, config = RecordedOps(), EngineArgs("tiny").create_engine_config().model
    hidden, intermediate = config.hf_config.hidden_size, config.hf_config.intermediate_size
    half = torch.bfloat16
    AtOnce(CPU).begin_ops(ops, config, half)
    assert ops.given == [
        ("rms_norm", (MANY_ROWS, hidden), half),
        ("add_rms_norm", (MANY_ROWS, hidden), half),
        ("swiglu", (MANY_ROWS, 2 * intermediate), half),
    ]


def test_sampling_in_every_way_of_a_step() -> None:
    kernels = select_slot_kernels(CPU)
    asked = []

    def sample_slots(
        state: DeviceState,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        masks: RowMasks | None,
    ) -> torch.Tensor:
        asked.append((logits.dtype, masks is not None))
        return kernels.sample_slots(state, logits, slots, positions, masks)

    watched = replace(kernels, sample_slots=sample_slots)
    half, single = torch.bfloat16, torch.float32
    AtOnce(CPU).begin_sampling(watched, VOCAB, half)
    assert asked == [(half, False), (half, True), (single, False)]
    asked.clear()
    AtOnce(CPU).begin_sampling(watched, VOCAB, single)
    assert asked == [(single, False), (single, True)]
