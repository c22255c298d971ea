"""LoRA's products by plain torch, the reference, and the form that a device's kernels have.

    shrink          a[slot, part p] @ x            of each row, in whatever form expand takes
    look_up         a[slot, token] * scale         the same of an embedding, whose x is one-hot
    replace         whole[slot] @ x                where the slot has such a weight
    expand          gain * product + b[slot, features of p] @ shrunk + bias     added to it
    expand_swiglu   expand, and then the activation of the product

Rows whose slots have nothing of a layer are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from asyncllm.kernels.records import AdapterRows as AdapterRows
from asyncllm.kernels.records import LoRAWeights as LoRAWeights
from asyncllm.models.layers.ops import SILU
from asyncllm.models.layers.torch_ops import swiglu

# What is done to a product [T, out], with what was shrunk of its input. None: the product has that
# of all slots behind its own columns, and is not changed.
Expand = Callable[[torch.Tensor, torch.Tensor | None, LoRAWeights, AdapterRows], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoRAOps:
    """Only enqueue, and may be captured, where their device has streams.

    gather_rows: (slots int32 [T], what each slot has of each layer [slots, layers]) -> rows.
    shrink: (x [T, in], weights, rows) -> what `expand` takes. look_up: the same of (token ids [T],
    weights, rows, scale). replace: (product [T, out], x,
    weights, rows), in place.
    """

    gather_rows: Callable[[torch.Tensor, torch.Tensor], AdapterRows]
    shrink: Callable[[torch.Tensor, LoRAWeights, AdapterRows], torch.Tensor]
    look_up: Callable[[torch.Tensor, LoRAWeights, AdapterRows, float], torch.Tensor]
    replace: Callable[[torch.Tensor, torch.Tensor, LoRAWeights, AdapterRows], None]
    expand: Expand
    expand_swiglu: Expand


def gather_rows(slots: torch.Tensor, adapted: torch.Tensor) -> AdapterRows:
    """A tile for each slot that rows have."""
    found = slots.unique()
    rows = slots.new_full((len(found), len(slots)), -1)
    for mine, slot in zip(rows, found, strict=True):
        own = (slots == slot).nonzero().squeeze(1)
        mine[: len(own)] = own
    kinds = adapted[found.long()].T.int()
    return AdapterRows(slots.long(), rows, torch.where(kinds > 0, 2 * found + kinds - 1, 0))


def _tiles(weights: LoRAWeights, rows: AdapterRows) -> Iterator[tuple[int, torch.Tensor]]:
    """The slots that have something of the layer, each with its rows."""
    for kind, mine in zip(rows.tiles[weights.index].tolist(), rows.rows, strict=True):
        if kind:
            yield kind // 2, mine[mine >= 0].long()


def shrink(x: torch.Tensor, weights: LoRAWeights, rows: AdapterRows) -> torch.Tensor:
    """[T, parts * max_rank]."""
    shrunk = x.new_zeros((len(x), weights.a.shape[1]))
    for slot, mine in _tiles(weights, rows):
        shrunk[mine] = x[mine] @ weights.a[slot].T
    return shrunk


def look_up(
    token_ids: torch.Tensor, weights: LoRAWeights, rows: AdapterRows, scale: float
) -> torch.Tensor:
    return weights.a[rows.slots, token_ids.long()] * scale


def replace(
    product: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, rows: AdapterRows
) -> None:
    for slot, mine in _tiles(weights, rows):
        for whole in weights.whole:
            if whole.is_there[slot]:
                features = slice(whole.first, whole.first + whole.weight.shape[1])
                product[mine, features] = F.linear(x[mine], whole.weight[slot])


def expand(
    product: torch.Tensor, shrunk: torch.Tensor | None, weights: LoRAWeights, rows: AdapterRows
) -> torch.Tensor:
    _, out_features, rank = weights.b.shape
    behind, size = product[:, out_features:], weights.a.shape[1]
    if shrunk is None:
        product = product[:, :out_features].clone()
    for slot, mine in _tiles(weights, rows):
        its = product[mine]
        of_slot = slice((slot - 1) * size, slot * size)
        own = behind[mine, of_slot] if shrunk is None else shrunk[mine]
        parts = weights.b[slot].split(weights.sizes)
        deltas = [h @ b.T for h, b in zip(own.split(rank, dim=1), parts, strict=True)]
        its.addcmul_(its, weights.gain[slot])
        product[mine] = its.add_(torch.cat(deltas, dim=1)).add_(weights.bias[slot])
    return product


def expand_swiglu(
    product: torch.Tensor, shrunk: torch.Tensor | None, weights: LoRAWeights, rows: AdapterRows
) -> torch.Tensor:
    return swiglu(expand(product, shrunk, weights, rows), SILU)


TORCH_LORA = LoRAOps(gather_rows, shrink, look_up, replace, expand, expand_swiglu)
