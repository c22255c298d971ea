"""Who may join rank 0 over TCP: those who know the secret, each as a rank of its own."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from asyncllm.errors import ModelLoadError
from asyncllm.frames import LENGTH, frame
from asyncllm.worker.ranks import handshake, joining
from asyncllm.worker.ranks.handshake import (
    Challenge,
    HandshakeError,
    Hello,
    Refused,
    Welcome,
    join,
    prove,
    read_secret,
)
from asyncllm.worker.ranks.joining import JoinedRanks, listen
from tests.waiting import PATIENCE_SECONDS

SECRET = b"a secret of several bytes"


class Waiting:
    """Rank 0, in a thread, that waits for ranks."""

    def __init__(self, *numbers: int) -> None:
        self.is_cancelled = False
        self.ranks = JoinedRanks(("127.0.0.1", 0), SECRET, numbers, lambda: self.is_cancelled)
        self.found: dict[int, socket.socket] = {}
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.found = self.ranks.start()
        except BaseException as error:
            self.error = error

    def end(self) -> dict[int, socket.socket]:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.found

    def close(self) -> None:
        self.is_cancelled = True
        self._thread.join(PATIENCE_SECONDS)
        for connected in self.found.values():
            connected.close()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    """For ranks 1 and 2."""
    made = Waiting(1, 2)
    yield made
    made.close()


def connect(waiting: Waiting) -> socket.socket:
    return socket.create_connection(waiting.ranks.address, PATIENCE_SECONDS)


class Joined(NamedTuple):
    rank: int
    socket: socket.socket


@contextmanager
def joined(waiting: Waiting, secret: bytes = SECRET, rank: int | None = None) -> Iterator[Joined]:
    with connect(waiting) as connected:
        yield Joined(asyncio.run(join(connected, secret, rank)), connected)


def receive(connected: socket.socket) -> Any:
    """One message of a handshake, or None at the end."""
    with connected.makefile("rb") as stream:
        if not (head := stream.read(LENGTH.size)):
            return None
        body = stream.read(*LENGTH.unpack(head))
    return msgspec.msgpack.decode(body, type=Challenge | Welcome | Refused)


def hello(challenge: Challenge, secret: bytes = SECRET, **changes: Any) -> Hello:
    said = {"version": challenge.version, "nonce": secrets.token_bytes(32), "rank": None} | changes
    proof = prove(secret, "joiner", challenge.nonce, said["nonce"], said["version"], said["rank"])
    return Hello(**said, proof=proof)  # type: ignore[arg-type]


def send(connected: socket.socket, message: msgspec.Struct) -> None:
    connected.sendall(frame(msgspec.msgpack.encode(message)))


def expect_both_join(waiting: Waiting) -> None:
    with joined(waiting) as one, joined(waiting) as other:
        found = waiting.end()
        assert {one.rank, other.rank} == {*found} == {1, 2}
        found[one.rank].sendall(b"to one")
        one.socket.settimeout(PATIENCE_SECONDS)
        assert one.socket.recv(6) == b"to one"


def test_ranks_in_the_order_of_their_coming_or_as_they_ask(waiting: Waiting) -> None:
    with joined(waiting, rank=2) as second, joined(waiting) as first:
        assert (first.rank, second.rank) == (1, 2)
        assert {*waiting.end()} == {1, 2}


def test_another_secret_is_refused(waiting: Waiting) -> None:
    with pytest.raises(HandshakeError, match="rank 0 refuses: its secret is another"):
        joined(waiting, b"another secret of several bytes").__enter__()
    expect_both_join(waiting)


@pytest.mark.parametrize(
    ("rank", "why"),
    [(1, "rank 1 has joined from 127.0.0.1:"), (3, r"rank 3 is none of those.* are \[2\]")],
)
def test_a_rank_that_is_taken_or_none(waiting: Waiting, rank: int, why: str) -> None:
    with joined(waiting, rank=1):
        with pytest.raises(HandshakeError, match=why):
            joined(waiting, rank=rank).__enter__()
        with joined(waiting):
            waiting.end()


def test_another_version_is_refused_by_both(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(waiting) as connected:
        send(connected, hello(receive(connected), version="0.0.1"))
        assert "it has asyncllm 0.0.1, rank 0" in receive(connected).why
    monkeypatch.setattr(handshake, "VERSION", "0.0.2")  # of rank 0
    with connect(waiting) as connected:
        challenge = receive(connected)
    assert challenge.version == "0.0.2"
    ours, theirs = listen("127.0.0.1", 0), socket.socket()
    with ours, theirs:
        theirs.connect(ours.getsockname())
        connected, _ = ours.accept()
        with connected:
            send(connected, Challenge("0.0.3", secrets.token_bytes(32)))
            with pytest.raises(HandshakeError, match=r"rank 0 has asyncllm 0\.0\.3, this is 0\.0"):
                asyncio.run(join(theirs, SECRET, None))
            assert b"Hello" in connected.recv(1000)  # rank 0 hears which version came


def test_a_recorded_handshake_is_worth_nothing(waiting: Waiting) -> None:
    with connect(waiting) as first:
        recorded = hello(receive(first))
        send(first, recorded)
        assert isinstance(receive(first), Welcome)
        with connect(waiting) as second:
            receive(second)
            send(second, recorded)
            assert receive(second) == Refused("its secret is another")
        with joined(waiting):
            waiting.end()


def test_nobody_joins_who_sends_rank_0s_proof_back(waiting: Waiting) -> None:
    """A proof says whose it is."""
    with connect(waiting) as connected:
        challenge = receive(connected)
        said = hello(challenge)
        said.proof = prove(SECRET, "rank 0", challenge.nonce, said.nonce, said.version, None)
        send(connected, said)
        assert receive(connected) == Refused("its secret is another")


def test_a_stranger_in_rank_0s_place() -> None:
    with listen("127.0.0.1", 0) as listener, socket.socket() as connected:
        connected.connect(listener.getsockname())
        stranger, _ = listener.accept()
        with stranger:
            send(stranger, Challenge(handshake.VERSION, secrets.token_bytes(32)))
            send(stranger, Welcome(1, secrets.token_bytes(32)))
            with pytest.raises(HandshakeError, match="does not know the secret"):
                asyncio.run(join(connected, SECRET, None))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        LENGTH.pack(handshake.MAX_MESSAGE_BYTES + 1),
        frame(b"\xc1"),
        frame(msgspec.msgpack.encode({"type": "Hello", "version": 1})),
        frame(b""),
        LENGTH.pack(100) + b"and then no more",
        b"",
    ],
)
def test_what_is_no_handshake_ends_its_connection_alone(waiting: Waiting, sent: bytes) -> None:
    with connect(waiting) as connected:
        receive(connected)
        connected.sendall(sent)
        with suppress(OSError):  # a reset: what it sent was not read to its end
            connected.shutdown(socket.SHUT_WR)
            assert connected.recv(1) == b""
    expect_both_join(waiting)


@pytest.mark.slow
def test_who_is_slow_keeps_nobody_from_joining(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 1.0)
    slow = [connect(waiting) for _ in range(joining.MAX_HANDSHAKES // 2)]
    for connected in slow:
        receive(connected)
        connected.sendall(b"\x01")
    start = time.monotonic()
    with joined(waiting, rank=1):
        assert time.monotonic() - start < 0.9
        for connected in slow:
            assert connected.recv(1) == b""
            connected.close()
        with joined(waiting):
            waiting.end()


def test_so_many_handshakes_at_once(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MAX_HANDSHAKES", 2)
    with connect(waiting) as one, connect(waiting) as other:
        assert receive(one) and receive(other)
        with connect(waiting) as third:
            assert receive(third) is None
    time.sleep(0.1)
    expect_both_join(waiting)


def test_a_rank_that_is_gone_while_others_are_waited_for(waiting: Waiting) -> None:
    with joined(waiting, rank=2):
        pass
    until = time.monotonic() + PATIENCE_SECONDS
    while waiting.ranks._names:  # it has one from before its welcome on
        assert time.monotonic() < until
    with joined(waiting, rank=2), joined(waiting):
        waiting.end()


def test_a_start_that_is_cancelled_or_waits_too_long(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(waiting) as (_, connected):
        waiting.is_cancelled = True
        with pytest.raises(ModelLoadError, match="cancelled"):
            waiting.end()
        connected.settimeout(PATIENCE_SECONDS)
        assert connected.recv(1) == b""
    monkeypatch.setattr(joining, "JOIN_SECONDS", 0.2)
    late = Waiting(4, 5)
    with pytest.raises(ModelLoadError, match=r"ranks 4, 5 have not joined for 0\.2 s"):
        late.end()
    with pytest.raises(ConnectionRefusedError):
        connect(late)


def test_where_the_secret_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(str(file)) == SECRET
    file.write_text("short\n")
    with pytest.raises(ValueError, match="secret: a secret has at least 16 bytes, got 5"):
        read_secret(str(file))
    monkeypatch.delenv(handshake.SECRET_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="ASYNCLLM_JOIN_SECRET: a secret has"):
        read_secret(None)
    monkeypatch.setenv(handshake.SECRET_VARIABLE, SECRET.decode())
    assert read_secret(None) == SECRET
