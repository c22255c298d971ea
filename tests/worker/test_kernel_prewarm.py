"""Early launches run in threads, in each way that steps sample, and raise at the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from asyncllm.config import EngineArgs
from asyncllm.kernels import registry
from asyncllm.kernels.declaration import Start
from asyncllm.kernels.records import HeadNorm
from asyncllm.models.registry import build_model
from asyncllm.worker import kernel_prewarm
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.kernel_prewarm import KernelPrewarm, early_start
from asyncllm.worker.memory import forward_without_attention
from asyncllm.worker.slot_changes import RECORD_WORDS
from tests.models.tiny_checkpoints import CONFIGS, random_reference
from tests.waiting import PATIENCE_SECONDS

CUDA = torch.device("cuda")  # that no launch here asks for
CPU = torch.device("cpu")
KERNELS = "asyncllm.kernels."
CUDA_OPS = "asyncllm.models.layers.cuda_ops"


def test_launches_run_side_by_side() -> None:
    early = KernelPrewarm(CUDA)
    both = threading.Barrier(2)
    for _ in range(2):
        early.begin(lambda: both.wait(PATIENCE_SECONDS))
    early.wait()
    assert not [t for t in threading.enumerate() if t.name.startswith("asyncllm-prewarm")]


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
    early = KernelPrewarm(CUDA)
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
    early = KernelPrewarm(CUDA)
    early.begin(lambda: modes.append(torch.is_inference_mode_enabled()))
    early.wait()
    assert modes == [True]


def test_what_is_begun_last_waits_for_what_was_begun_before() -> None:
    events: list[str] = []
    release = threading.Event()
    early = KernelPrewarm(CUDA)
    early.begin(lambda: (release.wait(PATIENCE_SECONDS), events.append("a variant")))
    early.begin_last(lambda: events.append("a step of it"))
    threading.Timer(0.05, release.set).start()
    early.settle()
    assert events == ["a variant", "a step of it"]
    early.wait()


def test_what_a_launch_raises_is_raised_after_all_have_ended() -> None:
    done: list[int] = []
    release = threading.Event()

    def fail() -> None:
        raise RuntimeError("no compiler")

    def slow() -> None:
        release.wait(PATIENCE_SECONDS)
        done.append(1)

    early = KernelPrewarm(CUDA)
    early.begin(fail)
    early.begin(slow)
    threading.Timer(0.05, release.set).start()
    with pytest.raises(RuntimeError, match="no compiler"):
        early.wait()
    assert done == [1]


def test_a_cpu_launches_nothing() -> None:
    early = KernelPrewarm(CPU)
    early.begin(lambda: pytest.fail("launched"))
    early.wait()


class Launched:
    """Notes launches in place of kernels, which need Triton."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def watch(self, kernel: str, *functions: str) -> None:
        module = import_module(f"asyncllm.kernels.{kernel}.kernel")
        for name in functions:
            self._monkeypatch.setattr(module, name, partial(self._note, name))

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name, args))

    def shapes(self) -> list[tuple[str, list[tuple[int, ...]]]]:
        """The shapes of the calls' tensors."""
        return [
            (name, [tuple(x.shape) for x in args if torch.is_tensor(x)])
            for name, args in self.calls
        ]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """With the kernels' modules on a Triton that is not there."""
    before = dict(sys.modules)
    for name, module in before.items():
        if name.startswith(KERNELS) and hasattr(module, "triton"):
            del sys.modules[name]
    triton = MagicMock()
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    yield Launched(monkeypatch)
    for name in [name for name in sys.modules if name.startswith(KERNELS)]:
        if name not in before:
            del sys.modules[name]
    sys.modules.update({name: before[name] for name in before if name.startswith(KERNELS)})


def a_start(**changes: Any) -> Start:
    config = EngineArgs("tiny", dtype="bfloat16").create_engine_config()
    start = replace(early_start(config, CPU), has_fast_ops=True, attention_backend="flashinfer")
    return replace(start, **changes)


def launch_all(kernel: str, start: Start) -> None:
    for launch in import_module(f"{KERNELS}{kernel}.kernel").prewarm(start):
        launch()


def test_slots_are_read_and_written(launched: Launched) -> None:
    names = ("gather_slots_triton", "fill_decodes_triton", "write_slots_triton")
    launched.watch("slots", *names)
    launch_all("slots", a_start())
    assert [name for name, _ in launched.calls] == list(names)
    assert isinstance(launched.calls[0][1][0], DeviceState)
    assert launched.shapes()[2] == (names[2], [(1, RECORD_WORDS), (3, 1)])


def test_what_is_between_gemms_has_the_model_sizes(launched: Launched) -> None:
    launched.watch("rms_norm", "rms_norm", "add_rms_norm", "swiglu")
    start, rows = a_start(), 128  # more than skinny_gemm takes
    hidden, intermediate = start.sizes.hidden_size, start.sizes.intermediate_size
    launch_all("rms_norm", start)
    assert launched.shapes() == [
        ("rms_norm", [(rows, hidden)]),
        ("add_rms_norm", [(rows, hidden)] * 2),
        ("swiglu", [(rows, 2 * intermediate)]),
    ]
    assert all(args[0].dtype is torch.bfloat16 for _, args in launched.calls)
    assert [args[-1].weight.shape for _, args in launched.calls[:2]] == [(hidden,)] * 2
    launched.calls.clear()
    launch_all("rms_norm", a_start(has_fast_ops=False))
    assert launched.calls == []


def test_heads_of_few_tokens_and_of_many(launched: Launched) -> None:
    launched.watch("rope_kv_write", "rotate_and_write")
    start = a_start()
    without_memory = torch.empty(2, start.layers[0].head_dim, device="meta")
    layer = replace(start.layers[0], head_norm=HeadNorm(*without_memory, 1.0))
    launch_all("rope_kv_write", replace(start, layers=[layer]))
    heads = layer.num_heads + 2 * layer.num_kv_heads
    pages = (1, 2, start.block_size, layer.num_kv_heads, layer.head_dim)
    assert launched.shapes() == [
        ("rotate_and_write", [(n, heads, layer.head_dim), pages, (n,)]) for n in (1, 128)
    ]
    for _, (given, *_) in launched.calls:
        assert given.head_norm.q_weight.device == given.head_norm.k_weight.device == CPU
    launched.calls.clear()
    launch_all("rope_kv_write", a_start(attention_backend="torch"))
    assert launched.calls == []


def test_sampling_in_every_way_of_a_step(launched: Launched) -> None:
    launched.watch("sampling", "sample_slots_triton")
    half, single = torch.bfloat16, torch.float32

    def sampled(dtype: torch.dtype) -> list[tuple[torch.dtype, bool]]:
        launched.calls.clear()
        launch_all("sampling", a_start(dtype=dtype))
        return [(args[1].dtype, args[4] is not None) for _, args in launched.calls]

    assert sampled(half) == [(half, False), (half, True), (single, False), (single, True)]
    assert sampled(single) == [(single, False), (single, True)]


class Variants:
    """In a kernel's place: notes of each launch what Triton compiles a variant for."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **flags: self.seen.add((*map(_variant, args), *sorted(flags.items())))


def _variant(given: Any) -> Any:
    if torch.is_tensor(given):
        return given.dtype, given.data_ptr() % 16 == 0
    return (given == 1, given % 16 == 0) if isinstance(given, int) else type(given)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "llama-mlp-bias", "llama-tied", "mistral", "qwen3"]
)
def test_the_first_step_of_one_row_finds_all_its_products(
    family: str, launched: Launched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the prewarm compiles nothing besides."""
    triton = sys.modules["triton"]
    monkeypatch.setattr(triton, "cdiv", lambda a, b: -(-a // b))
    monkeypatch.setattr(triton, "next_power_of_2", lambda n: 1 << (n - 1).bit_length())
    monkeypatch.setattr(kernel_prewarm, "has_fast_ops", lambda device, dtype: True)
    gemv = import_module(f"{KERNELS}gemv.kernel")
    monkeypatch.delitem(sys.modules, CUDA_OPS, raising=False)
    random_reference(deepcopy(CONFIGS[family])).save_pretrained(tmp_path)
    args = EngineArgs(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True)
    config = args.create_engine_config()
    early, steps = Variants(), Variants()
    monkeypatch.setattr(gemv, "_gemv_kernel", early)
    launch_all("gemv", early_start(config, CPU))
    monkeypatch.setattr(gemv, "_gemv_kernel", steps)
    ops = import_module(CUDA_OPS).CudaOps(CPU)
    model = build_model(config.model, torch.bfloat16, CPU, ops, 64)
    with torch.inference_mode():
        model.compute_logits(forward_without_attention(model, 1, CPU))
    del sys.modules[CUDA_OPS]
    assert early.seen == steps.seen
    assert len(early.seen) >= 3


def test_every_triton_kernel_that_can_be_is_prewarmed(launched: Launched) -> None:
    folder = Path(registry.__file__).parent
    kernels = {file.parent.name for file in folder.glob("*/kernel.py")}
    modules = {kernel: import_module(f"{KERNELS}{kernel}.kernel") for kernel in kernels}
    assert {*registry.PREWARMED} == {
        k for k, module in modules.items() if hasattr(module, "prewarm")
    }


def test_whole_steps_are_for_ranks_that_divide_each_layer() -> None:
    def start(**layout: int) -> Start:
        args = EngineArgs("tiny", dtype="bfloat16", **cast(Any, layout))
        return early_start(args.create_engine_config(), CPU)

    one, two, staged = start(), start(tensor_parallel_size=2), start(pipeline_parallel_size=2)
    assert (one.dense_weights, two.dense_weights, staged.dense_weights) == ("PLAIN", "PLAIN", None)
    assert (one.num_ranks, two.num_ranks) == (1, 2)
    assert two.sizes == one.sizes and two.layers[0].num_heads * 2 == one.layers[0].num_heads
    share = two.sizes.share(2)
    assert share.intermediate_size * 2 == one.sizes.intermediate_size
    assert share.vocab_size == -(-one.sizes.vocab_size // 2)


def test_stages_know_the_variants_of_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose rows come from the stage before."""
    monkeypatch.setattr(kernel_prewarm, "has_fast_ops", lambda device, dtype: True)
    config = EngineArgs("tiny", dtype="bfloat16", pipeline_parallel_size=2).create_engine_config()
    of_stages = [
        early_start(replace(config, mesh=replace(config.mesh, rank=rank)), CPU).row_products
        for rank in range(2)
    ]
    assert set(of_stages[1]) <= set(of_stages[0]) and of_stages[1]
