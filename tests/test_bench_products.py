"""The benchmark of products, with torch's own on a CPU for both ways and a clock of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from asyncllm.model_config import resolve_model_path
from asyncllm.models.layers.torch_ops import TorchOps
from tests.script_module import import_script

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_products.py"


bench_products = import_script(SCRIPT)


class Off(TorchOps):
    """One product is wrong."""

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().swiglu(x)


def seconds_of(ways: Sequence[Callable[[], object]]) -> list[float]:
    for way in ways:
        way()
    return [1e-3 * (i + 1) for i in range(len(ways))]


def test_each_product_and_what_they_add_up_to() -> None:
    model = bench_products.load(str(resolve_model_path("tiny")), torch.device("cpu"))
    line = bench_products.measure(model, {"one": TorchOps(), "other": TorchOps()}, 3, seconds_of)
    num_layers = len(model.layers)
    down = model.layers[0].mlp.down_proj.weights["weight"]
    assert line["down"]["one"]["us"] == round(1000 / num_layers, 2)
    assert line["down"]["other"]["tb_s"] == round(down.nbytes * num_layers / 2e-3 / 1e12, 2)
    assert line["layers"]["other"]["us"] == 2000
    assert line["difference"] == 0
    assert bench_products.show(line).startswith("   3 rows | qkv: one ")


def test_a_way_that_computes_something_else_is_seen() -> None:
    model = bench_products.load(str(resolve_model_path("tiny")), torch.device("cpu"))
    line = bench_products.measure(model, {"one": TorchOps(), "other": Off()}, 3, seconds_of)
    assert line["difference"] > 1e-3
