#!/usr/bin/env python3
"""Times a model's matrix products by their number of rows: cuBLAS's beside our kernel's for few.

    scripts/bench_products.py --model DIR --rows 2,8,16,24,32

Each product as one captured chain of all layers, so that weights come from memory and kernels
follow each other as in a step; with what belongs to it: SwiGLU, the addition to the residual, the
next norm. `layers` is all of them in a step's order, without attention. Microseconds of one
product, with the TB/s at which its weights are read, and how far apart the two ways' results are.
Weights are made up. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncllm.graphs.captured_times import captured_seconds
from asyncllm.model_config import ModelConfig, resolve_model_path
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.few_rows import FewRows
from asyncllm.models.layers.ops import AddRMSNorm, Epilogue, Norm, Normed, Ops, Out, SwiGLU
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.loader import load_weights
from asyncllm.models.registry import build_model

CONTEXT = 64  # positions that the model knows: nothing here asks for them
SecondsOf = Callable[[Sequence[Callable[[], object]]], list[float]]


class Chains:
    """The products of all layers of `model`, of so many rows, each kind one after the other."""

    def __init__(self, model: DenseDecoder, rows: int) -> None:
        weights = [layer.attention.qkv_proj.weights["weight"] for layer in model.layers]
        self.weights = {
            "qkv": weights,
            "o": [layer.attention.o_proj.weights["weight"] for layer in model.layers],
            "gate_up": [layer.mlp.gate_up_proj.weights["weight"] for layer in model.layers],
            "down": [layer.mlp.down_proj.weights["weight"] for layer in model.layers],
        }
        self._norm: Norm = model.norm.constants
        generator = torch.Generator(weights[0].device).manual_seed(0)
        sizes = {kind: each[0].shape[1] for kind, each in self.weights.items()}
        self._x = {
            kind: weights[0].new_empty(rows, size).normal_(generator=generator)
            for kind, size in sizes.items()
        }
        self._residual = weights[0].new_empty(rows, sizes["qkv"]).normal_(generator=generator)

    def product(self, ops: Ops, kind: str) -> None:
        x, residual = Normed(self._x[kind]), self._residual.clone()
        for weight in self.weights[kind]:
            if kind == "qkv":
                ops.product(x, weight)
            elif kind == "gate_up":
                _linear(ops, x, weight, SwiGLU())
            else:
                _linear(ops, x, weight, AddRMSNorm(residual, self._norm))

    def layers(self, ops: Ops) -> torch.Tensor:
        """What they leave in the residual."""
        normed, residual = Normed(self._x["qkv"]), self._residual.clone()
        add = AddRMSNorm(residual, self._norm)
        for qkv, o, gate_up, down in zip(*self.weights.values(), strict=True):
            ops.product(normed, qkv)
            normed = _linear(ops, Normed(self._x["o"]), o, add)
            gated = _linear(ops, normed, gate_up, SwiGLU())
            normed = _linear(ops, Normed(gated), down, add)
        return residual


def _linear(ops: Ops, x: Normed, weight: torch.Tensor, epilogue: Epilogue[Out]) -> Out:
    """As `Linear.with_epilogue`."""
    fused = epilogue.fused(ops, x, weight, None)
    return epilogue.apply(ops, ops.product(x, weight)) if fused is None else fused


def measure(
    model: DenseDecoder, ways: Mapping[str, Ops], rows: int, seconds_of: SecondsOf
) -> dict[str, Any]:
    """Microseconds, TB/s and the ways' relative difference of one number of rows."""
    chains = Chains(model, rows)
    line: dict[str, Any] = {"rows": rows}
    for kind, weights in chains.weights.items():
        seconds = seconds_of([partial(chains.product, ops, kind) for ops in ways.values()])
        num_bytes = sum(weight.nbytes for weight in weights)
        line[kind] = {
            name: {
                "us": round(each * 1e6 / len(weights), 2),
                "tb_s": round(num_bytes / each / 1e12, 2),
            }
            for name, each in zip(ways, seconds, strict=True)
        }
    seconds = seconds_of([partial(chains.layers, ops) for ops in ways.values()])
    line["layers"] = {
        name: {"us": round(each * 1e6, 1)} for name, each in zip(ways, seconds, strict=True)
    }
    first, *others = (chains.layers(ops).double() for ops in ways.values())
    line["difference"] = max(((each - first).norm() / first.norm()).item() for each in others)
    return line


def load(folder: str, device: torch.device) -> DenseDecoder:
    config = ModelConfig.from_folder(resolve_model_path(folder))
    model = build_model(config, torch.bfloat16, device, TorchOps(), CONTEXT)
    load_weights(model, Path(folder), "dummy", 0, progress=False)
    assert isinstance(model, DenseDecoder)
    return model


def ways_on(device: torch.device) -> dict[str, Ops]:
    from asyncllm.models.layers.cuda_ops import CudaOps  # needs Triton

    ways = {"cublas": CudaOps(device), "few_rows": CudaOps(device)}
    ways["cublas"]._few_rows = FewRows(torch.device("cpu"))  # has no such kernel
    return dict(ways)


def show(line: Mapping[str, Any]) -> str:
    cells = [f"{line['rows']:4} rows"]
    for kind, ways in line.items():
        if isinstance(ways, dict):
            told = ", ".join(
                f"{name} {way['us']}" + (f" ({way['tb_s']})" if "tb_s" in way else "")
                for name, way in ways.items()
            )
            cells.append(f"{kind}: {told}")
    return " | ".join([*cells, f"apart {line['difference']:.1e}"])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--rows", default="2,4,8,16,24,32")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    model, ways, lines = load(args.model, device), ways_on(device), []
    with torch.cuda.stream(torch.cuda.Stream()):
        for rows in map(int, args.rows.split(",")):
            lines.append(measure(model, ways, rows, captured_seconds))
            print(show(lines[-1]), flush=True)
    name = torch.cuda.get_device_name(device)
    print(json.dumps({"model": Path(args.model).name, "device": name, "lines": lines}))


if __name__ == "__main__":
    main()
