"""The sockets by which engines that share experts find each other, each in its own process.

Each two engines get a Unix socket pair, over which they agree on each step. The first engine gets a
socket that listens on loopback, for the store through which the ranks of all engines connect. The
engines' parent makes all of them anew for each start.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from asyncllm.engine.data_parallel.wire import Place

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineLink:
    """One engine's ends. listener: for the store, which the first engine has."""

    place: Place
    peers: dict[int, socket.socket]
    listener: socket.socket | None

    @classmethod
    def of(cls, place: Place, sockets: Sequence[socket.socket]) -> EngineLink:
        """In the engine's process, from its own copies of `sockets`."""
        others = [number for number in range(place.num_engines) if number != place.number]
        listener = sockets[-1] if place.number == 0 else None
        return cls(place, dict(zip(others, sockets, strict=False)), listener)

    @property
    def sockets(self) -> list[socket.socket]:
        found = [self.peers[number] for number in sorted(self.peers)]
        return found if self.listener is None else [*found, self.listener]

    @property
    def address(self) -> tuple[str, int]:
        """The address of the store."""
        return HOST, self.place.port

    def close(self) -> None:
        """Close this process's copies, after the engine's process was started."""
        for each in self.sockets:
            each.close()


def link_engines(num_engines: int) -> list[EngineLink]:
    """Raises `OSError`."""
    listener = socket.create_server((HOST, 0))
    peers: list[dict[int, socket.socket]] = [{} for _ in range(num_engines)]
    for one, other in combinations(range(num_engines), 2):
        peers[one][other], peers[other][one] = socket.socketpair()
    port = listener.getsockname()[1]
    return [
        EngineLink(Place(number, num_engines, port), each, None if number else listener)
        for number, each in enumerate(peers)
    ]
