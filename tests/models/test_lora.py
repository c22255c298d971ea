"""LoRA's products, by torch and by Triton, against their definition, row by row in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from asyncllm.models.layers import lora as lora_module
from asyncllm.models.layers.linear_method import LinearShape
from asyncllm.models.layers.lora import Delta, LoRALayers, LoRAWeights
from asyncllm.models.layers.lora_embedding import LoRAEmbedding
from asyncllm.models.layers.lora_ops import TORCH_LORA, AdapterRows, LoRAOps
from asyncllm.models.transformers_lora import adapt

NUM_SLOTS = 5
NOTHING, TERMS = 2, 4  # slots: one that has nothing of the layer, one with biases and gains
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def triton_ops() -> LoRAOps:
    pytest.importorskip("triton", reason="Triton is not installed")
    from asyncllm.kernels.lora import expand, replace, rows, shrink

    firsts = shrink.shrink, shrink.look_up
    return LoRAOps(rows.gather_rows, *firsts, replace.replace, expand.expand, expand.expand_swiglu)


@dataclass
class Case:
    """One layer with the adapters of all slots, and rows that have them or none."""

    layers: LoRALayers
    weights: LoRAWeights
    slots: torch.Tensor
    x: torch.Tensor
    product: torch.Tensor
    behind: torch.Tensor | None  # `LoRALayer.behind`

    def made(self) -> torch.Tensor:
        """By a base's GEMM, with what `a` of all slots shrinks behind it if they lie there."""
        if self.behind is None:
            return self.product
        return torch.cat((self.product, F.linear(self.x, self.behind.flatten(0, 1))), dim=1)

    def delta(self) -> Delta:
        self.layers.select(self.slots)
        (_, layer) = self.layers.layers
        delta = layer.delta(self.x)  # type: ignore[attr-defined]
        assert delta is not None
        return delta

    def exact(self) -> torch.Tensor:
        """By definition."""
        weights, out = self.weights, self.product.double().clone()
        for row, slot in enumerate(self.slots.tolist()):
            if not self.layers.slots[slot, weights.index]:
                continue
            x, gain = self.x[row].double(), weights.gain[slot].double()
            for whole in weights.whole:
                if whole.is_there[slot]:
                    features = slice(whole.first, whole.first + whole.weight.shape[1])
                    out[row, features] = whole.weight[slot].double() @ x
            shrunk = (weights.a[slot].double() @ x).split(weights.b.shape[2])
            parts = weights.b[slot].double().split(weights.sizes)
            delta = torch.cat([b @ h for b, h in zip(parts, shrunk, strict=True)])
            if slot == TERMS:
                out[row] += out[row] * gain
                delta += weights.bias[slot].double()
            out[row] += delta
        return out


def case(
    num_rows: int,
    sizes: tuple[int, ...],
    in_features: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    ops: LoRAOps = TORCH_LORA,
    slots: list[int] | None = None,
    whole: bool = False,
    behind: bool = False,
) -> Case:
    torch.manual_seed(num_rows + rank)
    saved = ["part0", "part2"] if len(sizes) > 2 else ["part0"]
    layers = LoRALayers(NUM_SLOTS, rank, dtype, DEVICE, ops, whole=saved if whole else ())
    parts = {f"part{i}": size for i, size in enumerate(sizes)}
    layers.layer(LinearShape({"other": 24}, 8, bias=False))  # what lies before it in each slot
    layer = layers.layer(LinearShape(parts, in_features, bias=False))
    base = {"weight": torch.randn(sum(sizes), in_features, dtype=dtype, device=DEVICE)}
    with patch.object(lora_module, "MOST_BEHIND", 1000 if behind else 0):
        layer.extend(base)
    layers.allocate()
    weights = layer.weights
    layers.slots[1:].normal_(std=0.1)
    for slot in range(1, NUM_SLOTS + 1):
        if slot != TERMS:
            weights.bias[slot], weights.gain[slot] = 0, 0
        if slot == NOTHING:
            for tensor in (weights.a, weights.b):
                tensor[slot] = 0
        for each in weights.whole:
            each.is_there[slot] = 1.0 if slot % 2 else 0.0
        layers.mark(layers.slots[slot])
        layers.copy_behind(slot)
    of_row = torch.randint(NUM_SLOTS + 1, (num_rows,)) if slots is None else torch.tensor(slots)
    x = torch.randn(num_rows, in_features, device=DEVICE).to(dtype)
    product = torch.randn(num_rows, sum(sizes), device=DEVICE).to(dtype)
    return Case(layers, weights, of_row.to(DEVICE, torch.int32), x, product, layer.behind)


def check(it: Case, *, gated: bool = False) -> None:
    """`add`, in place unless `a` lies behind; or `add_swiglu`. Rows without an adapter are as they
    were, bit by bit."""
    exact, given = it.exact(), it.product.clone()
    untouched = (it.slots == 0) | (it.slots == NOTHING)
    if gated:
        made = it.delta().add_swiglu(it.made())
        gate, up = exact.chunk(2, dim=1)
        exact = F.silu(gate) * up
    else:
        made = it.delta().add(it.made())
        assert (made is it.product) == (it.behind is None)
        assert made.shape == given.shape and made.is_contiguous()
        assert torch.equal(made[untouched], given[untouched])
    error = (made.double() - exact).norm() / exact.norm()
    assert error < BOUNDS[it.product.dtype], error
    worst = (made.double() - exact).abs().amax(1) / exact.abs().amax(1)
    assert worst.max() < 3 * BOUNDS[it.product.dtype], worst


SIZES = [(64,), (96, 32), (160, 40, 24)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 150])
@pytest.mark.parametrize("rank", [16, 32])
def test_reference(num_rows: int, sizes: tuple[int, ...], rank: int) -> None:
    check(case(num_rows, sizes, 72, rank, whole=True))
    check(case(num_rows, sizes, 72, rank))
    check(case(num_rows, sizes, 72, rank, behind=True))


@pytest.mark.parametrize("sizes", [(48, 48), (96,)])
def test_reference_with_swiglu(sizes: tuple[int, ...]) -> None:
    check(case(20, sizes, 72, 16), gated=True)
    check(case(20, sizes, 72, 16, behind=True), gated=True)


def test_a_lies_behind_bases_that_it_makes_little_larger() -> None:
    """And which are no adapters' whole weights; a base's own rows are its first ones."""
    for out, whole, is_behind in ((16 * 8 * 2, (), True), (255, (), False), (256, ("it",), False)):
        layers = LoRALayers(2, 16, torch.float32, DEVICE, whole=whole)
        layer = layers.layer(LinearShape({"it": out}, 8, bias=True))
        base = {"weight": torch.empty(out, 8), "bias": torch.empty(out)}
        given = base["weight"]
        longer = layer.extend(base)
        assert (layer.behind is not None) == is_behind
        assert (longer is base) == (base["weight"] is given) == (not is_behind)
        if is_behind:
            assert [*longer["weight"].shape] == [out + 32, 8] and not longer["bias"][out:].any()
            assert base["weight"].data_ptr() == longer["weight"].data_ptr()
            assert len(base["weight"]) == len(base["bias"]) == out


# Rows and rank: of one tile and of several, of few rows and of many; inputs of one chunk, of one
# that is not full, of several pieces, and of pieces of several chunks.
ROWS = [(1, 16), (7, 64), (40, 16), (40, 32), (300, 16), (300, 64), (40, 128)]
INPUTS = [72, 512, 1100]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("num_rows", "rank"), ROWS)
@pytest.mark.parametrize("in_features", INPUTS)
def test_triton(num_rows: int, rank: int, sizes: tuple[int, ...], in_features: int) -> None:
    dtype = torch.bfloat16 if IS_CUDA else torch.float32
    check(case(num_rows, sizes, in_features, rank, dtype, triton_ops()))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("num_rows", "rank"), ROWS)
def test_triton_of_a_behind_the_base(num_rows: int, rank: int, sizes: tuple[int, ...]) -> None:
    dtype = torch.bfloat16 if IS_CUDA else torch.float32
    check(case(num_rows, sizes, 72, rank, dtype, triton_ops(), behind=True))


@pytest.mark.parametrize("sizes", [(200, 200), (144,)])
@pytest.mark.parametrize(("num_rows", "rank"), ROWS)
def test_triton_with_swiglu(num_rows: int, rank: int, sizes: tuple[int, ...]) -> None:
    dtype = torch.bfloat16 if IS_CUDA else torch.float32
    for behind in (False, True):
        check(case(num_rows, sizes, 600, rank, dtype, triton_ops(), behind=behind), gated=True)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_triton_of_each_type(dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and not IS_CUDA:
        pytest.skip("Triton's interpreter multiplies its bits")
    check(case(40, (160, 40, 24), 600, 16, dtype, triton_ops()))
    check(case(40, (72, 72), 600, 16, dtype, triton_ops()), gated=True)


@pytest.mark.parametrize("num_rows", [1, 40, 300])
def test_triton_of_whole_weights(num_rows: int) -> None:
    dtype = torch.bfloat16 if IS_CUDA else torch.float32
    check(case(num_rows, (160, 40, 24), 72, 16, dtype, triton_ops(), whole=True))


@pytest.mark.parametrize("slots", [[0] * 20, [NOTHING] * 20, [3] * 20, [1, 0] * 10])
def test_triton_of_one_adapter_and_of_none(slots: list[int]) -> None:
    for gated, behind in product((False, True), repeat=2):
        it = case(20, (32, 32), 72, 16, ops=triton_ops(), slots=slots, behind=behind)
        check(it, gated=gated)


@pytest.mark.parametrize("num_rows", [1, 20, 300])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_embeddings(num_rows: int, backend: str) -> None:
    if backend == "torch" and IS_CUDA:
        pytest.skip("the CPU's")
    ops, dtype = TORCH_LORA if backend == "torch" else triton_ops(), torch.float32
    torch.manual_seed(num_rows)
    layers = LoRALayers(NUM_SLOTS, 16, dtype, DEVICE, ops)
    weight = torch.randn(50, 72, dtype=dtype, device=DEVICE)
    embedding = LoRAEmbedding(layers, "it", 50, weight, slice(0, 50), scale=3.0)
    layers.register(embedding)
    layers.allocate()
    for slot in (1, 3):  # the others have nothing
        (place,) = layers.places(layers.slots[slot]).values()
        assert place.a is not None
        place.a.normal_()
        place.b.normal_()
        layers.mark(layers.slots[slot])
    slots = torch.randint(NUM_SLOTS + 1, (num_rows,), dtype=torch.int32, device=DEVICE)
    ids = torch.randint(50, (num_rows,), device=DEVICE, dtype=torch.int32)
    given = weight[ids.long()] * 3
    exact = given.clone()
    for row, (slot, token) in enumerate(zip(slots.tolist(), ids.tolist(), strict=True)):
        (place,) = layers.places(layers.slots[slot]).values()
        assert place.a is not None
        exact[row] += 3 * (place.b @ place.a[:, token])
    assert torch.equal(embedding.add(given, ids), given)  # no row of this pass has an adapter
    layers.select(slots)
    torch.testing.assert_close(embedding.add(given, ids), exact, atol=1e-3, rtol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """A seed gives the same text whatever else runs: to the last bit, in steps of a size."""
    ops = triton_ops()
    alone = case(40, (64,), 600, 16, ops=ops, slots=[3] + [0] * 39)
    among = case(40, (64,), 600, 16, ops=ops, slots=[3, *([1, 3, 4, 0, 5] * 8)[:39]])
    rows = [it.delta().add(it.product)[0] for it in (alone, among)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 100, 300, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_gathered(num_rows: int, seed: int) -> None:
    """Each row once, with its own slot, in tiles of one slot; and lines say what slots have."""
    ops = triton_ops()
    torch.manual_seed(seed)
    num_slots, num_layers = (1, 3, 40)[seed], (1, 5, 130)[seed]
    slots = torch.randint(1 + num_slots, (num_rows,), dtype=torch.int32, device=DEVICE)
    if seed == 1:
        slots = slots * (torch.rand(num_rows, device=DEVICE) < 0.1)  # many of none
    adapted = torch.randint(3, (1 + num_slots, num_layers), device=DEVICE).to(torch.bfloat16)
    adapted[0] = 0
    slots = slots.int()
    made = ops.gather_rows(slots, adapted)
    num_tiles, tile = made.rows.shape
    assert made.tiles.shape == (num_layers, num_tiles) and torch.equal(made.slots, slots.long())
    wanted: list[tuple[int, list[int]]] = []
    for slot in range(1 + num_slots):
        mine = (slots == slot).nonzero().squeeze(1).tolist()
        wanted += [(slot, mine[i : i + tile]) for i in range(0, len(mine), tile)]
    assert len(wanted) <= num_tiles
    wanted += [(0, [])] * (num_tiles - len(wanted))
    for (slot, mine), rows, kinds in zip(wanted, made.rows.tolist(), made.tiles.T, strict=True):
        assert rows == mine + [-1] * (tile - len(mine))
        has = adapted[slot].int()
        assert torch.equal(kinds, torch.where(has > 0, 2 * slot + has - 1, 0).int())


def test_modules_of_transformers_code_that_are_given_views() -> None:
    """As of Mamba: some columns of another product, or what was transposed. Kernels take rows."""

    def shrink(x: torch.Tensor, weights: LoRAWeights, rows: AdapterRows) -> torch.Tensor:
        assert x.is_contiguous()
        return TORCH_LORA.shrink(x, weights, rows)

    torch.manual_seed(0)
    ops = replace(TORCH_LORA, shrink=shrink)
    layers = LoRALayers(1, 16, torch.float32, torch.device("cpu"), ops)
    module = torch.nn.Linear(8, 6).requires_grad_(False)
    shards: Any = SimpleNamespace(parameters={}, elsewhere=())
    adapt({"module": module}, layers, shards)
    layers.allocate()
    layers.slots[1].normal_()
    layers.mark(layers.slots[1])
    for x in (torch.randn(1, 3, 20)[..., 4:12], torch.randn(1, 8, 3).transpose(1, 2)):
        layers.select(torch.ones(3, dtype=torch.int32))
        found = module(x)
        torch.testing.assert_close(found, module(x.contiguous()))
        layers.select(None)
        assert not torch.allclose(found, module(x))
