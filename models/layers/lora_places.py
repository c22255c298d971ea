"""Where a module of the checkpoint has its matrices in a slot of adapters, for who fills it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The part of a module's weight that is here: its `rows` (None: all) of these columns.

    base: the model's; None where it is quantised. whole: an adapter's own in the slot, where it has
    room for one, and `is_whole` [1], which says that there is one.
    """

    shape: tuple[int, int]  # the module's
    rows: torch.Tensor | None
    columns: slice
    base: torch.Tensor | None
    whole: torch.Tensor | None = None
    is_whole: torch.Tensor | None = None

    @property
    def is_there(self) -> bool:
        """The adapter's own."""
        return self.is_whole is not None and bool(self.is_whole.item())


@dataclass(frozen=True, slots=True)
class Place:
    """Where one module of the checkpoint has its matrices in one slot: views.

    Where ranks share the layer, a rank's matrices have the rows or columns of its product; so what
    they add to a summand is a summand, too.

    rows: output i here is the module's output rows[i]. base_bias: what the slot's bias is added to.
    """

    in_features: int  # the module's, as out_features
    out_features: int
    a: torch.Tensor | None  # [max_rank, in]; None: it is another rank's
    b: torch.Tensor  # [out, max_rank]
    columns: slice = field(default_factory=lambda: ALL)  # of the module's inputs
    rows: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # [out]; None: it adds none here
    gain: torch.Tensor | None = None  # [out]; None: it has none
    takes_bias: bool = False  # there, or on another rank
    base_bias: torch.Tensor | None = None
    weight: WeightPart | None = None
