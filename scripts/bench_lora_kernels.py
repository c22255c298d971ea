#!/usr/bin/env python3
"""Times LoRA's kernels on one CUDA device, in us per layer, captured back to back in a graph.

    scripts/bench_lora_kernels.py --rows 1 8 64 256 2048 --adapters 1 8 --rank 16
    ... --variants EXPAND_COLUMNS=256 PIECE_COLUMNS=256,FEW_ROWS_CHUNK=256
                         after it also with other values of constants of asyncllm/kernels/lora

Four products a layer, of the 8B's shapes by default, with the norms and SwiGLU between them but no
attention. `alone`: what comes on top of the products, one after the other without them. `base`,
`with`: a layer's products without adapters and with them, where both hide behind each other what
they can; `more` is their difference, which a step pays for each layer. Each of the layers has
adapters of its own, as an L2 cache would else hold them, but for an `a` behind a base's weight.
Rows have the adapters in turn. `--most-behind 0`: no `a` lies there. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from asyncllm.graphs.pool import GraphPool
from asyncllm.models.layers import lora as lora_module
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.linear_method import UnquantizedLinearMethod
from asyncllm.models.layers.lora import LoRALayer, LoRALayers
from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed, Ops, SwiGLU
from asyncllm.worker.kernels import select_lora_ops, select_ops

ROUNDS = 20


class Sizes(NamedTuple):
    hidden: int
    kv: int  # of k, and of v
    intermediate: int


class Layer(NamedTuple):
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class Layers:
    """`num_layers` of them, each with adapters of its own; their weights are those of a few."""

    def __init__(
        self,
        sizes: Sizes,
        num_layers: int,
        adapters: int,
        rank: int,
        device: torch.device,
        ops: Ops,
    ) -> None:
        dtype = torch.bfloat16
        self.sizes, self.ops = sizes, ops
        self.lora = LoRALayers(adapters, rank, dtype, device, select_lora_ops(device))
        method = UnquantizedLinearMethod(dtype, device, ops)
        build = Build(dtype, device, ops, lambda name: method, 1, self.lora)
        hidden, kv, wide = sizes.hidden, sizes.kv, sizes.intermediate

        def linear(parts: dict[str, int], size: int) -> Linear:
            return Linear("", parts, size, False, build)

        self.layers = [
            Layer(
                linear({"q": hidden, "k": kv, "v": kv}, hidden),
                linear({"o": hidden}, hidden),
                linear({"gate": wide, "up": wide}, hidden),
                linear({"down": hidden}, wide),
            )
            for _ in range(num_layers)
        ]
        few = self.layers[:2]
        for index, layer in enumerate(self.layers):
            for linear_, source in zip(layer.linears, few[index % 2].linears, strict=True):
                mine, its = linear_._lora, source._lora
                assert mine is not None and its is not None
                linear_.weights, mine.behind = source.weights, its.behind
                linear_._adapted_weights = source._adapted_weights
        for layer in few:
            for linear_ in layer.linears:
                linear_.weights["weight"].normal_(std=0.01)
        self.lora.allocate()
        self.fill_slots(0.01)
        self.norm = Norm(torch.ones(hidden, dtype=dtype, device=device), 1e-5)

    def fill_slots(self, std: float) -> None:
        """Give each slot matrices in each layer, and neither biases nor gains."""
        self.lora.slots[1:].normal_(std=std)
        for layer in self.layers:
            for lora in self.adapters(layer):
                lora.weights.bias.zero_()
                lora.weights.gain.zero_()
        self.lora.slots[1:, : len(self.lora.layers)] = 1
        for slot in range(1, len(self.lora.slots)):
            self.lora.copy_behind(slot)

    def inputs(self, num_rows: int) -> dict[int, torch.Tensor]:
        """By their sizes."""
        wanted = {self.sizes.hidden, self.sizes.intermediate}
        like = self.norm.weight
        return {size: torch.randn(num_rows, size, device=like.device).to(like) for size in wanted}

    def forward(self, num_rows: int, slots: torch.Tensor | None) -> Callable[[], torch.Tensor]:
        """Returns the norm that ends the last layer, [T, hidden]."""
        x, sizes = self.inputs(num_rows)[self.sizes.hidden], self.sizes

        def run() -> torch.Tensor:
            self.lora.select(slots)
            residual = x.clone()
            end, normed = AddRMSNorm(residual, self.norm), Normed(x)
            for layer in self.layers:
                attended = layer.qkv(normed)[:, : sizes.hidden].contiguous()
                normed = layer.o.with_epilogue(Normed(attended), end)
                gated = Normed(layer.gate_up.with_epilogue(normed, SwiGLU()))
                normed = layer.down.with_epilogue(gated, end)
            return normed.whole()

        return run

    def alone(self, num_rows: int, slots: torch.Tensor) -> Callable[[], None]:
        """SwiGLU is in it, as adapters may be added by its kernel."""
        inputs, device = self.inputs(num_rows), slots.device
        like = self.norm.weight
        products: dict[int, torch.Tensor] = {}
        for lora in self.adapters(self.layers[0]):
            size = lora.weights.b.shape[1]
            more = 0 if lora.behind is None else lora.behind.flatten(0, 1).shape[0]
            products[size] = torch.zeros(num_rows, size + more, dtype=like.dtype, device=device)

        def run() -> None:
            self.lora.select(slots)
            for layer in self.layers:
                for lora in self.adapters(layer):
                    _, out, size = *lora.weights.b.shape[:2], lora.weights.a.shape[2]
                    delta = lora.delta(inputs[size])
                    assert delta is not None
                    is_gated = len(lora.weights.sizes) == 2
                    (delta.add_swiglu if is_gated else delta.add)(products[out])

        return run

    @staticmethod
    def adapters(layer: Layer) -> list[LoRALayer]:
        return [linear._lora for linear in layer.linears if linear._lora is not None]


def captured_us(works: Sequence[Callable[[], object]]) -> list[float]:
    """The median of ROUNDS replays of each, in which they alternate."""
    pool = GraphPool()

    def record(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> tuple[()]:
            work()
            return ()

        return pool.record(run).replay

    replays = [record(work) for work in works]
    times: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for replay, mine in zip(replays, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()  # to read the time
            mine.append(start.elapsed_time(end) * 1e3)
    return [statistics.median(each[2:]) for each in times]


def time_rows(layers: Layers, num_rows: int, adapters: int) -> dict[str, float]:
    """us per layer."""
    device = layers.norm.weight.device
    slots = (1 + torch.arange(num_rows, device=device) % adapters).int()
    names = ("base", "with", "alone")
    works = [
        layers.forward(num_rows, None),
        layers.forward(num_rows, slots),
        layers.alone(num_rows, slots),
    ]
    for work in works:
        work()
    layers.ops.before_capture()
    num_layers = len(layers.layers)
    us = {name: us / num_layers for name, us in zip(names, captured_us(works), strict=True)}
    us["more"] = us["with"] - us["base"]
    return {name: round(each, 2) for name, each in us.items()}


def time_variant(layers: Layers, args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """A table of one variant."""
    print(f"\n{variant or 'as it is'}, rank {args.rank}, us per layer")
    print("rows adapters |    base    with    more |  alone", flush=True)
    found: dict[str, Any] = {}
    with constants(variant):
        for num_rows in args.rows:
            for adapters in args.adapters:
                us = time_rows(layers, num_rows, adapters)
                found[f"{num_rows} rows, {adapters} adapters"] = us
                times = " ".join(f"{us[name]:7.1f}" for name in ("base", "with", "more"))
                print(f"{num_rows:4} {adapters:8} | {times} | {us['alone']:6.1f}", flush=True)
    return found


@contextmanager
def constants(variant: str) -> Iterator[None]:
    """NAME=VALUE,... in the modules of the kernels, and what was there again at the end."""
    from asyncllm.kernels.lora import expand, rows, shrink

    before: list[tuple[Any, str, int]] = []
    try:
        for setting in filter(None, variant.split(",")):
            name, _, value = setting.partition("=")
            modules = [each for each in (rows, shrink, expand) if hasattr(each, name)]
            if not modules:
                raise SystemExit(f"asyncllm/kernels/lora has no {name}")
            for module in modules:
                before.append((module, name, getattr(module, name)))
                setattr(module, name, int(value))
        yield
    finally:
        for module, name, old in reversed(before):
            setattr(module, name, old)


def run(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda")
    lora_module.MOST_BEHIND = args.most_behind
    sizes = Sizes(args.hidden, args.kv, args.intermediate)
    ops = select_ops(device, torch.bfloat16, args.rows)
    layers = Layers(sizes, args.layers, max(args.adapters), args.rank, device, ops)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rank": args.rank}
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for variant in ("", *args.variants):
            found[variant] = time_variant(layers, args, variant)
    return found | {"ops": type(ops).__name__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 2048])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--kv", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--most-behind", type=float, default=lora_module.MOST_BEHIND)
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME=VALUE,...")
    args = parser.parse_args()
    print(json.dumps(run(args)))


if __name__ == "__main__":
    main()
