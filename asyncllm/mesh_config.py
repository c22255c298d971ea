"""A process's place among the ranks that share one model, and its share of each size. No torch.

Ranks are numbered stage by stage: rank = stage * tp + place.

    layers            of each stage its own, in order; the first has the two ends of the model, too
    heads of q        equal shares of each layer's
    heads of k and v  equal shares; of fewer heads than places each is had by several ranks
    feed-forward      equal shares of its inner size; experts likewise, or each rank some experts,
                      of one engine or of all that share the experts
    vocabulary        equal shares, the last filled up with rows that count for nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncllm.errors import ModelLoadError

DistributedBackend = Literal["uni", "mp", "ray"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Who starts the ranks beyond the first, and where they find it: `MeshConfig.size / nnodes`
    run on rank 0's host, and others join it at `address`; or all others are Ray's."""

    backend: DistributedBackend = "mp"
    nnodes: int = 1
    address: str | None = None  # of rank 0's host, for the others; None: loopback, or as Ray has it
    port: int = 0
    secret_file: str | None = None


@dataclass(frozen=True, slots=True)
class RankStats:
    """How a rank fares, as rank 0 sees it."""

    rank: int
    is_up: bool = True
    lag_seconds: float = 0.0  # for which it has not answered, or has kept the others waiting


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """tp: ranks that divide every layer. by_expert: they divide experts by number, not by size.
    pp: stages, which divide the layers. dp: engines of so many ranks each, which divide nothing but
    the experts among each other, by number; engine: which of them this rank is of."""

    tp: int = 1
    rank: int = 0
    by_expert: bool = False
    pp: int = 1
    dp: int = 1
    engine: int = 0

    @property
    def size(self) -> int:
        """The ranks of one engine."""
        return self.tp * self.pp

    @property
    def is_alone(self) -> bool:
        """Whether no step has calls to other ranks."""
        return self.size == 1 and self.dp == 1

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def place(self) -> int:
        """Among the ranks of its stage."""
        return self.rank % self.tp

    def layers(self, num_layers: int) -> range:
        """Those of this rank's stage. Raises `ModelLoadError`."""
        if self.pp > num_layers:
            raise ModelLoadError(
                f"pipeline_parallel_size {self.pp} is more than num_hidden_layers {num_layers}"
            )
        first, end = (stage * num_layers // self.pp for stage in (self.stage, self.stage + 1))
        return range(first, end)

    def share(self, size: int, name: str) -> slice:
        """This rank's part of `size` things. Raises `ModelLoadError` with their name."""
        return _share(size, name, self.place, self.tp, f"tensor_parallel_size {self.tp}")

    def expert_share(self, num_experts: int) -> slice:
        """This rank's experts where they are divided by number. Raises `ModelLoadError`."""
        who = f"tensor_parallel_size {self.tp}"
        if self.dp > 1:
            who = f"data_parallel_size {self.dp} times {who}"
        place = self.engine * self.tp + self.place
        return _share(num_experts, "the number of experts", place, self.dp * self.tp, who)

    def kv_share(self, num_heads: int) -> slice:
        """The same of the heads of k and v."""
        if num_heads >= self.tp:
            return self.share(num_heads, "num_key_value_heads")
        if self.tp % num_heads:
            raise ModelLoadError(
                f"tensor_parallel_size {self.tp} is no multiple of num_key_value_heads {num_heads}"
            )
        head = self.place * num_heads // self.tp
        return slice(head, head + 1)

    def vocabulary_share(self, size: int) -> tuple[slice, int]:
        """The tokens that this rank has, and how many there is room for, on every rank."""
        each = -(-size // self.tp)
        return slice(min(self.place * each, size), min((self.place + 1) * each, size)), each


def _share(size: int, name: str, place: int, num_places: int, who: str) -> slice:
    if size % num_places:
        raise ModelLoadError(f"{who} does not divide {name} {size}")
    each = size // num_places
    return slice(place * each, (place + 1) * each)
