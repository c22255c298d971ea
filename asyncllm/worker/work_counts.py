"""Counts how steps ran, from graphs or eagerly, and how much padding they had.

Written by the thread that runs steps (on the CPU the device's thread); may be read at any time.
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
    num_padding: int = 0  # padding rows or tokens

    def ran(
        self, kind: str, num_tokens: int, graph_tokens: int | None = None, num_padding: int = 0
    ) -> None:
        """Count a step of `num_tokens`, which ran eagerly or in a graph of `graph_tokens`.
        num_padding: how many of `num_tokens` are padding."""
        self.steps[kind, "eager" if graph_tokens is None else "graph"] += 1
        self.num_tokens += num_tokens - num_padding
        self.num_padding += num_padding
        if graph_tokens is not None:
            self.num_padding += graph_tokens - num_tokens
