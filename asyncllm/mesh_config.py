"""A rank's place among the ranks that share a model, and its share of each size. No torch.

Ranks are numbered stage by stage: rank = stage * tp + place.

    layers            each stage has consecutive layers; the first also has embedding and LM head
    q heads           equal shares
    KV heads          equal shares; if there are fewer heads than ranks, ranks share them
    feed-forward      equal shares of the inner size; experts likewise, or whole experts per rank,
                      of one engine or of all engines that share the experts
    vocabulary        equal shares, the last one padded
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncllm.errors import ModelLoadError

DistributedBackend = Literal["uni", "mp", "ray"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Who starts ranks other than 0, and where they join. `MeshConfig.size / nnodes` ranks run on
    rank 0's host, the others join at `address`; with Ray, it starts all others."""

    backend: DistributedBackend = "mp"
    nnodes: int = 1
    address: str | None = None  # rank 0's host; None: loopback, or Ray's address
    port: int = 0
    secret_file: str | None = None


@dataclass(frozen=True, slots=True)
class RankStats:
    """The state of a rank, as rank 0 knows it."""

    rank: int
    is_up: bool = True
    lag_seconds: float = 0.0  # since it last answered, or while other ranks wait for it


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """tp: ranks that divide each layer. by_expert: ranks have whole experts. pp: pipeline
    stages. dp: engines that divide only the experts among each other, `size` ranks each. engine:
    the number of this rank's engine."""

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
    def only_divides_layers(self) -> bool:
        """Whether there are neither stages nor engines that share experts."""
        return self.pp == 1 and self.dp == 1

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def place(self) -> int:
        """The rank within its stage."""
        return self.rank % self.tp

    def layers(self, num_layers: int) -> range:
        """The layers of this rank's stage. Raises `ModelLoadError`."""
        if self.pp > num_layers:
            raise ModelLoadError(
                f"pipeline_parallel_size {self.pp} is more than num_hidden_layers {num_layers}"
            )
        first, end = (stage * num_layers // self.pp for stage in (self.stage, self.stage + 1))
        return range(first, end)

    def share(self, size: int, name: str) -> slice:
        """This rank's part of `size` items. Raises `ModelLoadError` naming them."""
        return _share(size, name, self.place, self.tp, f"tensor_parallel_size {self.tp}")

    def expert_share(self, num_experts: int) -> slice:
        """This rank's experts, if `by_expert`. Raises `ModelLoadError`."""
        who = f"tensor_parallel_size {self.tp}"
        if self.dp > 1:
            who = f"data_parallel_size {self.dp} times {who}"
        place = self.engine * self.tp + self.place
        return _share(num_experts, "the number of experts", place, self.dp * self.tp, who)

    def kv_share(self, num_heads: int) -> slice:
        """This rank's KV heads. Raises `ModelLoadError`."""
        if num_heads >= self.tp:
            return self.share(num_heads, "num_key_value_heads")
        if self.tp % num_heads:
            raise ModelLoadError(
                f"tensor_parallel_size {self.tp} is no multiple of num_key_value_heads {num_heads}"
            )
        head = self.place * num_heads // self.tp
        return slice(head, head + 1)

    def vocabulary_share(self, size: int) -> tuple[slice, int]:
        """This rank's tokens, and the number of rows on each rank, including padding."""
        each = -(-size // self.tp)
        return slice(min(self.place * each, size), min((self.place + 1) * each, size)), each


def _share(size: int, name: str, place: int, num_places: int, who: str) -> slice:
    if size % num_places:
        raise ModelLoadError(f"{who} does not divide {name} {size}")
    each = size // num_places
    return slice(place * each, (place + 1) * each)
