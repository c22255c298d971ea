"""How the device's steps were run: from a graph or kernel by kernel, and what padding cost.

Written where steps are run (on the CPU that is the device's thread), read by anybody at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RunKind = Literal["decode", "mixed"]  # mixed: with prefill chunks
RunMode = Literal["graph", "eager"]


@dataclass(slots=True)
class WorkCounts:
    """Running totals."""

    steps: dict[tuple[RunKind, RunMode], int] = field(
        default_factory=lambda: {
            ("decode", "graph"): 0,
            ("decode", "eager"): 0,
            ("mixed", "graph"): 0,
            ("mixed", "eager"): 0,
        }
    )
    num_tokens: int = 0
    num_padding: int = 0  # rows or tokens that were computed for nothing

    def ran(self, kind: RunKind, num_tokens: int, graph_tokens: int | None = None) -> None:
        """A step of `num_tokens`, in a graph of `graph_tokens` where there was one."""
        self.steps[kind, "eager" if graph_tokens is None else "graph"] += 1
        self.num_tokens += num_tokens
        if graph_tokens is not None:
            self.num_padding += graph_tokens - num_tokens
