"""The two ends of a model that speak of the vocabulary: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.lora import LoRAEmbedding
from asyncllm.models.layers.ops import Normed


class Embedding:
    """Token ids -> vectors, times `scale`."""

    def __init__(
        self, name: str, vocab_size: int, size: int, build: Build, scale: float = 1.0
    ) -> None:
        self.weight_name = f"{name}.weight"
        self.weight = build.empty(vocab_size, size)
        self._scale = scale
        self._lora = None
        if build.lora is not None:
            self._lora = build.lora.register(LoRAEmbedding(build.lora, name, self.weight, scale))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 or int64 [T] -> [T, size], a new tensor."""
        vectors = F.embedding(token_ids, self.weight)
        if self._scale != 1.0:
            vectors.mul_(self._scale)
        return vectors if self._lora is None else self._lora.add(vectors, token_ids)

    def loads(self) -> Iterator[Load]:
        yield Load(self.weight_name, self.weight)


class LMHead:
    """Hidden states -> logits, by its own matrix or, tied, by the embedding's.

    The product is multiplied by `scale`, then it becomes soft_cap * tanh(product / soft_cap).
    `aliases` names what a tied checkpoint may repeat: checkpoint name -> the name it must equal.
    """

    def __init__(
        self,
        name: str,
        embedding: Embedding,
        tied: bool,
        build: Build,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        self._name = f"{name}.weight"
        self._tied = tied
        self._scale, self._soft_cap = scale, soft_cap
        self._ops = build.ops
        self.weight = embedding.weight if tied else build.empty(*embedding.weight.shape)
        self.aliases = {self._name: embedding.weight_name} if tied else {}
        self._lora = None
        if build.lora is not None:
            self._lora = build.lora.layer({name: len(self.weight)}, self.weight.shape[1])
            self._lora.base = {"weight": self.weight}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, size] -> [S, vocab_size], in the model's dtype."""

        def product() -> torch.Tensor:
            return self._ops.product(Normed(hidden), self.weight)

        logits = product() if self._lora is None else self._lora.add(product, hidden)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._soft_cap is not None:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def loads(self) -> Iterator[Load]:
        if not self._tied:
            yield Load(self._name, self.weight)
