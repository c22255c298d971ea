"""The adapters of an embedding: a row of `a` for each token id, as peft's lora_embedding_A has a
column, and where slots have room for it a matrix in the place of the base's. It has no biases and
no gains, but room for them, as what is added to a linear layer's product is by the same kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.layers.lora_ops import LoRAWeights
from asyncllm.models.layers.lora_places import ALL, Place, WeightPart


class LoRAEmbedding:
    """weight: the base's, of the `tokens` that this rank has, and perhaps rows of nothing. Whole
    matrices are shared by ranks as it is; low-rank ones each rank has."""

    def __init__(
        self,
        owner: LoRALayers,
        name: str,
        vocab_size: int,
        weight: torch.Tensor,
        tokens: slice,
        scale: float,
    ) -> None:
        self._owner, self._name, self._scale = owner, name, scale
        self._weight, self._tokens = weight, tokens
        size = weight.shape[1]
        low_rank = (vocab_size, owner.max_rank), (size, owner.max_rank)
        self.shapes: list[tuple[int, ...]] = [*low_rank, (size,), (size,)]
        if owner.has_whole(name):
            self.shapes += [(1,), tuple(weight.shape)]

    def bind(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        a, b, bias, gain, *self._whole = tensors
        self._weights = LoRAWeights(a, b, bias, gain, (b.shape[1],), index)

    def kind(self, tensors: Sequence[torch.Tensor]) -> int:
        return int(bool(tensors[1].any()))

    def places(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Place]]:
        a, b, _, _, *whole = tensors
        is_whole, its = whole or (None, None)
        rows = torch.arange(len(a))[self._tokens]
        its = None if its is None else its[: len(rows)]
        weight = WeightPart((len(a), len(b)), rows, ALL, self._weight, its, is_whole)
        yield self._name, Place(len(a), len(b), a.T, b, weight=weight)

    def replace(self, vectors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """vectors [T, size], which the weight has in these rows: those of the tokens' adapters."""
        if self._owner.rows is None or not self._whole:
            return vectors
        (is_there, weight), slots = self._whole, self._owner.rows.slots
        return torch.where(is_there[slots] != 0, weight[slots, rows.long()], vectors)

    def add(self, vectors: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """vectors [T, size] of token_ids [T], with the tokens' deltas, in place."""
        rows, ops = self._owner.rows, self._owner.ops
        if rows is None:
            return vectors
        shrunk = ops.look_up(token_ids, self._weights, rows, self._scale)
        return ops.expand(vectors, shrunk, self._weights, rows)
