"""How the device's steps were run: from a graph or kernel by kernel, and what padding cost.

Written where steps are run (on the CPU that is the device's thread), read by anybody at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

KINDS = tuple(product(("decode", "mixed"), ("graph", "eager")))  # mixed: with prefill chunks


@dataclass(slots=True)
class WorkCounts:
    """Running totals."""

    steps: dict[tuple[str, str], int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_tokens: int = 0
    num_padding: int = 0  # rows or tokens that were computed for nothing

    def ran(
        self, kind: str, num_tokens: int, graph_tokens: int | None = None, num_padding: int = 0
    ) -> None:
        """A step of `num_tokens`, `num_padding` included, in a graph of `graph_tokens` where there
        was one."""
        self.steps[kind, "eager" if graph_tokens is None else "graph"] += 1
        self.num_tokens += num_tokens - num_padding
        self.num_padding += num_padding
        if graph_tokens is not None:
            self.num_padding += graph_tokens - num_tokens
