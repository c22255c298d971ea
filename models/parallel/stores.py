"""Stores of torch.distributed, where ranks find each other before they have a mesh."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

from torch import distributed

_c10d: Any = distributed  # whose stubs lack much of it


def open_store(num_ranks: int, listener: socket.socket) -> Any:
    """Where ranks find each other, in this process, at an address that is listened at already."""
    return _c10d.TCPStore(
        *listener.getsockname()[:2],
        world_size=num_ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def find_store(num_ranks: int, host: str, port: int) -> Any:
    """The store that another process has opened."""
    return _c10d.TCPStore(host, port, world_size=num_ranks, is_master=False)


class EngineStore(NamedTuple):
    """Where the ranks of engines that share experts find each other: of all of them."""

    store: Any
    address: tuple[str, int]
