"""Work beside the steps that the engine gives a worker, in the order of launches and commands.

A command is a record of numbers, as a `PackedStep` is: whatever has a share of the model does the
same in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClearPages:
    """Zero these pages, after all that was launched before."""

    page_ids: list[int]


@dataclass(frozen=True, slots=True)
class CaptureGraph:
    """Capture the next of the graphs that were left for idle moments; blocks for 10 to 20 ms."""


WorkerCommand = ClearPages | CaptureGraph
