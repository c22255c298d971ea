"""The two ends of a model that speak of the vocabulary: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.ops import Normed


class Embedding:
    """Token ids -> vectors."""

    def __init__(self, name: str, vocab_size: int, size: int, build: Build) -> None:
        self.weight_name = f"{name}.weight"
        self.weight = build.empty(vocab_size, size)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 or int64 [T] -> [T, size], a new tensor."""
        return F.embedding(token_ids, self.weight)

    def loads(self) -> Iterator[Load]:
        yield Load(self.weight_name, self.weight)


class LMHead:
    """Hidden states -> logits, by its own matrix or, tied, by the embedding's.

    `aliases` names what a tied checkpoint may repeat: checkpoint name -> the name it must equal.
    """

    def __init__(self, name: str, embedding: Embedding, tied: bool, build: Build) -> None:
        self._name = f"{name}.weight"
        self._tied = tied
        self._ops = build.ops
        self.weight = embedding.weight if tied else build.empty(*embedding.weight.shape)
        self.aliases = {self._name: embedding.weight_name} if tied else {}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, size] -> [S, vocab_size], in the model's dtype."""
        return self._ops.product(Normed(hidden), self.weight)

    def loads(self) -> Iterator[Load]:
        if not self._tied:
            yield Load(self._name, self.weight)
