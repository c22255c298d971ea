"""Embedding and LM head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear_method import LinearShape, Shard
from asyncllm.models.layers.lora import LoRALayer
from asyncllm.models.layers.lora_embedding import LoRAEmbedding
from asyncllm.models.layers.ops import Normed


class Embedding:
    """Token ids -> vectors, multiplied by `scale`."""

    def __init__(
        self, name: str, vocab_size: int, size: int, build: Build, scale: float = 1.0
    ) -> None:
        self.weight_name = f"{name}.weight"
        self.mesh, self.vocab_size = build.mesh, vocab_size
        self.tokens, num_rows = build.mesh.config.vocabulary_share(vocab_size)
        self.weight = build.empty(num_rows, size)
        self._scale = scale
        self._lora = None
        if build.lora is not None:
            lora = LoRAEmbedding(build.lora, name, vocab_size, self.weight, self.tokens, scale)
            self._lora = build.lora.register(lora)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 or int64 [T] -> [T, size], a new tensor."""
        if self.mesh.config.tp > 1:
            vectors = self.mesh.reduce(self._own(token_ids))
        else:
            vectors = self._vectors(token_ids)
        if self._scale != 1.0:
            vectors.mul_(self._scale)
        return vectors if self._lora is None else self._lora.add(vectors, token_ids)

    def _vectors(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up rows in the weight, or in the tokens' adapters."""
        vectors = F.embedding(rows, self.weight)
        return vectors if self._lora is None else self._lora.replace(vectors, rows)

    def _own(self, token_ids: torch.Tensor) -> torch.Tensor:
        """This rank's vectors; zeros for tokens of other ranks."""
        others = (token_ids < self.tokens.start) | (token_ids >= self.tokens.stop)
        places = (token_ids - self.tokens.start).masked_fill_(others, 0)
        return self._vectors(places).masked_fill_(others.unsqueeze(1), 0)

    def loads(self) -> Iterator[Load]:
        yield self.load_rows(self.weight_name, self.weight)

    def load_rows(self, name: str, weight: torch.Tensor) -> Load:
        """Load this rank's rows of a matrix with a row per token."""
        if self.mesh.config.tp == 1:
            return Load(name, weight)
        own = weight[: self.tokens.stop - self.tokens.start]
        return Load(name, own, (self.tokens,), file_shape=(self.vocab_size, weight.shape[1]))


class LMHead:
    """Hidden states -> logits, by its own matrix or, if tied, by the embedding's.

    Logits are multiplied by `scale`, then soft-capped: soft_cap * tanh(logits / soft_cap).
    aliases: tensors that a tied checkpoint may repeat -> the name of the tensor they must equal.
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
        self._embedding = embedding
        self.weight = embedding.weight if tied else build.empty(*embedding.weight.shape)
        self.aliases = {self._name: embedding.weight_name} if tied else {}
        self._lora = None
        if build.lora is not None:
            shard = Shard({name: (embedding.tokens,)})
            shape = LinearShape({name: embedding.vocab_size}, self.weight.shape[1], False, shard)
            self._lora = build.lora.register(LoRALayer(build.lora, shape, len(self.weight)))
            self._lora.base = {"weight": self.weight}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, size] -> [S, vocab_size], in the model's dtype."""
        delta = None if self._lora is None else self._lora.delta(hidden)
        logits = self._ops.product(Normed(hidden), self.weight)
        if delta is not None:
            logits = delta.add(logits)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._soft_cap is not None:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return self.gathered(logits)

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the logits of all ranks' shares of the vocabulary: [S, n] -> [S, vocab_size]."""
        mesh = self._embedding.mesh
        if mesh.config.tp == 1:
            return logits
        return mesh.gather(logits)[:, : self._embedding.vocab_size].contiguous()

    def loads(self) -> Iterator[Load]:
        if not self._tied:
            yield self._embedding.load_rows(self._name, self.weight)
