"""The kernels of LoRA's delta against its definition, token by token in float64."""

from __future__ import annotations

import pytest
import torch

from asyncllm.models.layers.linear_method import LinearShape
from asyncllm.models.layers.lora import LoRALayers, LoRAWeights, add_lora_torch

NUM_SLOTS = 5
IS_CUDA = torch.cuda.is_available()


def add_by_definition(
    product: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, slots: torch.Tensor
) -> torch.Tensor:
    rank = weights.b.shape[2]
    deltas = []
    whole_rows = product.double().clone()
    for whole in weights.whole:
        features = slice(whole.first, whole.first + whole.weight.shape[1])
        for row, slot in enumerate(slots.tolist()):
            if slot and whole.is_there[slot]:
                whole_rows[row, features] = whole.weight[slot].double() @ x[row].double()
    gains = torch.where((slots != 0).unsqueeze(1), weights.gain[slots.long()].double(), 0)
    product = whole_rows * (1 + gains)
    for row, slot in zip(x.double(), slots.tolist(), strict=True):
        h = (weights.a[slot].double() @ row).split(rank)
        b = weights.b[slot].double().split(weights.sizes)
        delta = torch.cat([each @ low for each, low in zip(b, h, strict=True)])
        delta += weights.bias[slot].double()
        deltas.append(delta if slot else delta * 0)
    return product + torch.stack(deltas)


def case(
    num_tokens: int, sizes: tuple[int, ...], in_features: int, rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, LoRAWeights, torch.Tensor]:
    torch.manual_seed(num_tokens + rank)
    device = torch.device("cuda" if IS_CUDA else "cpu")
    saved = ["part0", "part2"] if len(sizes) > 2 else ["part0"]
    layers = LoRALayers(NUM_SLOTS, rank, dtype, device, whole=saved)
    parts = {f"part{i}": size for i, size in enumerate(sizes)}
    layers.layer(LinearShape({"other": 24}, 8, bias=False))  # what lies before it in each slot
    layer = layers.layer(LinearShape(parts, in_features, bias=False))
    layers.allocate()
    layers.slots.normal_(std=0.1)
    for place in (each for slot in layers.slots[::2] for each in layers.places(slot).values()):
        if place.weight is not None and place.weight.is_whole is not None:
            place.weight.is_whole.fill_(0)
    slots = torch.randint(NUM_SLOTS + 1, (num_tokens,), dtype=torch.int32, device=device)
    x = torch.randn(num_tokens, in_features, dtype=dtype, device=device)
    product = torch.randn(num_tokens, sum(sizes), dtype=dtype, device=device)
    return product, x, layer.weights, slots


@pytest.mark.parametrize("sizes", [(64,), (96, 32), (160, 40, 24)])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 150])
@pytest.mark.parametrize("rank", [16, 32])
def test_reference(num_tokens: int, sizes: tuple[int, ...], rank: int) -> None:
    product, x, weights, slots = case(num_tokens, sizes, 72, rank, torch.float32)
    exact = add_by_definition(product, x, weights, slots)
    assert add_lora_torch(product, x, weights, slots) is product
    torch.testing.assert_close(product.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(64,), (96, 32), (160, 40, 24)])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 150])
@pytest.mark.parametrize("rank", [16, 32])
def test_triton(num_tokens: int, sizes: tuple[int, ...], rank: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from asyncllm.kernels.lora.kernel import add_lora_triton

    dtype = torch.bfloat16 if IS_CUDA else torch.float32
    for in_features in (72, 512, 1100):
        product, x, weights, slots = case(num_tokens, sizes, in_features, rank, dtype)
        exact = add_by_definition(product, x, weights, slots)
        assert add_lora_triton(product, x, weights, slots) is product
        bound = 2e-2 if IS_CUDA else 1e-4
        error = (product.double() - exact).norm() / exact.norm()
        assert error < bound
        untouched = slots == 0
        assert torch.equal(product[untouched].double(), exact[untouched])
