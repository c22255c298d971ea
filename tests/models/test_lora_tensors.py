"""Reading an adapter beside running streams: its values checked, in short turns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from asyncllm import host
from asyncllm.errors import LoRALoadError
from asyncllm.models.layers.linear_method import LinearShape
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.lora_adapter import read_adapter
from asyncllm.models.lora_tensors import AdapterTensors
from tests.engine.adapter_files import write_adapter

NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
OPERATIONS_PER_TURN = 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_value_that_is_not_finite_is_found(
    tmp_path: Path, dtype: torch.dtype, bad: float
) -> None:
    file = tmp_path / "file.safetensors"
    tensors = {f"good{n}": torch.randn(n).to(dtype) for n in (0, 1, 33, 5000)}
    tensors["good"] = torch.randn(()).to(dtype)
    for index in (0, 17, 4096, 4999):
        tensors[f"bad{index}"] = torch.randn(5000).to(dtype)
        tensors[f"bad{index}"][index] = bad
    save_file(tensors, file)
    with safe_open(file, framework="pt") as opened, file.open("rb") as content:
        read = AdapterTensors(file, opened, content)
        for name, tensor in tensors.items():
            if name.startswith("good"):
                assert torch.equal(read.read(name), tensor.float())
            else:
                with pytest.raises(LoRALoadError, match=f"{name} holds NaN or infinity"):
                    read.read(name)


def test_a_file_that_is_shortened_meanwhile(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(4)}, file)
    with safe_open(file, framework="pt") as opened, file.open("rb") as content:
        read = AdapterTensors(file, opened, content)
        with file.open("rb+") as shortened:
            shortened.truncate(file.stat().st_size - 4)
        with pytest.raises(LoRALoadError, match="ends within b"):
            read.read("b")


class Turns(TorchDispatchMode):
    """Counts torch's operations and the tensors of files between two pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.done: list[Counter[str]] = []
        self._now: Counter[str] = Counter()
        read = AdapterTensors.read

        def counted(tensors: AdapterTensors, *args: Any) -> torch.Tensor:
            self._now["tensors"] += 1
            return read(tensors, *args)

        monkeypatch.setattr(AdapterTensors, "read", counted)
        monkeypatch.setattr(host.time, "sleep", self.pause)

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.done.append(self._now)
        self._now = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._now["operations"] += 1
        return function(*args, **(kwargs or {}))

    def most(self, what: str) -> int:
        return max(turn[what] for turn in [*self.done, self._now])


@pytest.mark.parametrize("num_layers", [3, 40])
def test_turns_are_short_however_large_the_adapter(
    tmp_path: Path, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop waits for the GIL for as long as a turn at most."""
    shapes = {"mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24)}
    folder = write_adapter(tmp_path, num_layers, shapes)
    layers = LoRALayers(1, 8, torch.float32, torch.device("cpu"))
    for layer in range(num_layers):
        name = f"model.layers.{layer}.mlp"
        gate_up = {f"{name}.gate_proj": 16, f"{name}.up_proj": 16}
        layers.layer(LinearShape(gate_up, 24, bias=False))
        layers.layer(LinearShape({f"{name}.down_proj": 24}, 16, bias=False))
    layers.allocate()
    with Turns(monkeypatch) as turns:
        read_adapter(folder, layers, torch.zeros(layers.slots.shape[1]))
    assert sum(turn["tensors"] for turn in turns.done) == num_layers * 6
    assert turns.most("tensors") == 2  # one module's
    assert turns.most("operations") <= OPERATIONS_PER_TURN
