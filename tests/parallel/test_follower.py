"""A rank beyond the first, without a process: what it does meanwhile and what it answers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.errors import LoRALoadError
from asyncllm.frames import Frames
from asyncllm.worker.ranks.follower import Follower
from asyncllm.worker.ranks.messages import (
    Kind,
    Message,
    decode,
    encode,
)
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Rank 0's end of the connection; a follower has the other end."""
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_SECONDS)
        follower = Follower(theirs)
        monkeypatch.setattr(follower, "_start", lambda message: worker)
        threading.Thread(target=run, args=(follower,), daemon=True).start()
        yield ours
        ours.shutdown(socket.SHUT_RDWR)
        assert ended.wait(PATIENCE_SECONDS)


may_read = threading.Event()


def read(folder: Path, place: int) -> None:
    """A disk that is slow, files that are no adapter, and memory that is not there."""
    assert may_read.wait(PATIENCE_SECONDS)
    if place == 7:
        raise LoRALoadError(f"{folder} has none")
    if place == 8:
        raise MemoryError("none left")


commands: list[Any] = []
worker: Any = SimpleNamespace(
    adapters=SimpleNamespace(read=read),
    memory=SimpleNamespace(num_pages=1),
    drain=lambda: None,
    capture_graph=lambda: commands.append("capture"),
    clear_pages=commands.append,
)


def run(follower: Follower) -> None:
    try:
        follower.run()
    except Exception:
        assert may_read.is_set()


def received(connected: socket.socket, count: int) -> list[Message]:
    frames, messages = Frames(), list[Message]()
    while len(messages) < count:
        messages += map(decode, frames.feed(connected.recv(1 << 16)))
    return messages


def test_what_comes_after_an_adapter_does_not_wait_for_its_files(rank_0: socket.socket) -> None:
    """Each answer says what it answers, so rank 0 does not take one for another's."""
    may_read.clear()
    rank_0.sendall(encode(Kind.START))
    assert received(rank_0, 1) == [(Kind.READY, 1)]
    for number, (kind, *content) in enumerate(
        [(Kind.READ_ADAPTER, "a", 0), (Kind.READ_ADAPTER, "b", 7), (Kind.SYNC, 0)]
    ):
        rank_0.sendall(encode(kind, number, *content))
    assert received(rank_0, 1) == [(Kind.DONE, 2, "")]
    may_read.set()
    assert received(rank_0, 2) == [(Kind.DONE, 0, ""), (Kind.DONE, 1, "b has none")]


def test_what_is_no_fault_of_an_adapter_ends_the_rank(rank_0: socket.socket) -> None:
    may_read.set()
    rank_0.sendall(encode(Kind.START) + encode(Kind.READ_ADAPTER, 0, "a", 8))
    assert received(rank_0, 2) == [(Kind.READY, 1), (Kind.FAILED, "MemoryError: none left")]


def test_commands_are_done_in_their_order(rank_0: socket.socket) -> None:
    commands.clear()
    rank_0.sendall(encode(Kind.START))
    rank_0.sendall(encode(Kind.CAPTURE_GRAPH, 0) + encode(Kind.CLEAR_PAGES, 1, [3]))
    rank_0.sendall(encode(Kind.SYNC, 2, 0))
    received(rank_0, 2)
    assert commands == ["capture", [3]]
