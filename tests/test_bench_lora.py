"""The LoRA benchmarks' parts that need no GPU: both run, small, on the CPU."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest
import torch

from asyncllm.models.layers.torch_ops import TorchOps
from tests.script_module import import_script

SCRIPTS = Path(__file__).parent.parent / "scripts"
bench_lora = import_script(SCRIPTS / "bench_lora.py")
bench_lora_kernels = import_script(SCRIPTS / "bench_lora_kernels.py")


def test_cases_share_engines() -> None:
    assert bench_lora.engines(bench_lora.CASES) == [
        ["off"], ["0x16", "1x16", "8x16"], ["32x16"], ["8x64"],
    ]  # fmt: skip


@pytest.mark.slow
def test_table_of_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        model="tiny", load_format="dummy", cases=["off", "0x4", "2x4"], streams=3, tokens=3,
        gap_tokens=200,
    )  # fmt: skip
    found = asyncio.run(bench_lora.run(args))
    assert list(found["cases"]) == args.cases
    assert found["gaps"]["2x4"].keys() == {
        "gap_ms", "loop_ms", "load_gap_ms", "load_loop_ms", "load_read_gap_ms", "load_read_ms",
    }  # fmt: skip
    bench_lora.print_table(found)
    assert "2x4" in capsys.readouterr().out.splitlines()[-1]


@torch.inference_mode()
def test_kernels_are_called_as_a_layer_calls_them() -> None:
    sizes = bench_lora_kernels.Sizes(hidden=64, kv=32, intermediate=96)
    layers = bench_lora_kernels.Layers(sizes, 3, 4, 16, torch.device("cpu"), TorchOps())
    slots = 1 + torch.arange(8, dtype=torch.int32) % 4
    plain, adapted = layers.forward(8, None), layers.forward(8, slots)
    for run in (plain, adapted, layers.alone(8, slots)):
        run()


def test_a_variant_ends() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from asyncllm.kernels.lora import expand, rows, shrink

    before = expand.EXPAND_COLUMNS, rows.FEW_ROWS_TILE
    with bench_lora_kernels.constants("EXPAND_COLUMNS=64,FEW_ROWS_TILE=32"):
        assert (expand.EXPAND_COLUMNS, rows.FEW_ROWS_TILE, shrink.FEW_ROWS_TILE) == (64, 32, 32)
    assert before == (expand.EXPAND_COLUMNS, rows.FEW_ROWS_TILE)
    with (
        pytest.raises(SystemExit, match="has no NOTHING"),
        bench_lora_kernels.constants("NOTHING=1"),
    ):
        raise AssertionError
