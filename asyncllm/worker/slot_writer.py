"""Writes the changes of slots that came with the inbox: alone, or as part of another's graph.

What is written is what the inbox holds, so that one captured launch serves every step. It is
captured because Triton's launcher takes four times as long as a replay.
"""

from __future__ import annotations

from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.inbox import Inbox
from asyncllm.worker.slot_changes import WriteSlots


class SlotWriter:
    """Launches until `capture`."""

    def __init__(self, state: DeviceState, inbox: Inbox, write_slots: WriteSlots) -> None:
        self._state = state
        self._inbox = inbox
        self._write_slots = write_slots
        self._graph: Graph | None = None

    def capture(self, pool: GraphPool) -> None:
        self._inbox.clear()

        def write() -> tuple[()]:
            self.launch()
            return ()

        self._graph, _ = pool.record(write)

    def launch(self) -> None:
        """May be captured."""
        self._write_slots(self._state, self._inbox.records, self._inbox.entries)

    def write(self) -> None:
        if self._graph is None:
            self.launch()
        else:
            self._graph.replay()
