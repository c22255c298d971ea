"""How a rank of another host and rank 0 learn that each knows the secret, before either obeys.

    rank 0 -> joiner   Challenge   its version, a nonce
    joiner -> rank 0   Hello       its version, a nonce, the rank that it asks for, proof
    rank 0 -> joiner   Welcome     the rank that it is, proof; or Refused, why

A proof is an HMAC of the secret over both nonces and what its sender says, so a recorded one is
worth nothing. The joiner proves first: a stranger gets nothing to try secrets on. What is said
afterwards is neither encrypted nor signed, as the ranks' tensors are not: docs/DEPLOY.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncllm.frames import LENGTH, frame

SECRET_VARIABLE = "ASYNCLLM_JOIN_SECRET"
MIN_SECRET_BYTES = 16
NONCE_BYTES = 32
MAX_MESSAGE_BYTES = 1024  # of a handshake
HANDSHAKE_SECONDS = 5.0
VERSION = version("asyncllm")
# A host that is gone without a word is noticed by TCP after so many seconds.
OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class HandshakeError(ConnectionError):
    """The other side is not who it should be, or says so of this one."""


class Challenge(msgspec.Struct, tag=True):
    version: str
    nonce: bytes


class Hello(msgspec.Struct, tag=True):
    version: str
    nonce: bytes
    rank: int | None  # None: any
    proof: bytes


class Welcome(msgspec.Struct, tag=True):
    rank: int
    proof: bytes


class Refused(msgspec.Struct, tag=True):
    why: str


def read_secret(file: str | None) -> bytes:
    """Without white space around it. Raises `ValueError`, `OSError`."""
    if file is None:
        source, secret = SECRET_VARIABLE, os.environ.get(SECRET_VARIABLE, "").encode()
    else:
        source, secret = file, Path(file).read_bytes()
    if len(secret := secret.strip()) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{source}: a secret has at least {MIN_SECRET_BYTES} bytes, got {len(secret)}: "
            "`openssl rand -hex 32` makes one"
        )
    return secret


def prove(secret: bytes, who: Literal["joiner", "rank 0"], *said: Any) -> bytes:
    """By `who`, so that neither side's proof serves the other."""
    return hmac.digest(secret, msgspec.msgpack.encode((who, *said)), hashlib.sha256)


async def join(connected: socket.socket, secret: bytes, rank: int | None) -> int:
    """The rank that this process is. Raises `HandshakeError`, `OSError`, `TimeoutError`."""
    _set_up(connected)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        challenge: Challenge = await _receive(connected, Challenge)
        nonce = secrets.token_bytes(NONCE_BYTES)
        said = challenge.nonce, nonce, VERSION, rank
        await _send(connected, Hello(VERSION, nonce, rank, prove(secret, "joiner", *said)))
        if challenge.version != VERSION:
            raise HandshakeError(f"rank 0 has asyncllm {challenge.version}, this is {VERSION}")
        answer: Welcome | Refused = await _receive(connected, Welcome | Refused)
        if isinstance(answer, Refused):
            raise HandshakeError(f"rank 0 refuses: {answer.why}")
        expected = prove(secret, "rank 0", *said, answer.rank)
        if not hmac.compare_digest(answer.proof, expected):
            raise HandshakeError("who answers as rank 0 does not know the secret")
        return answer.rank


async def admit(
    connected: socket.socket, secret: bytes, choose: Callable[[int | None], int]
) -> int:
    """Rank 0's side: the rank that `choose` gives for the one asked for; what it raises of
    `HandshakeError` is told. Raises as `join`."""
    _set_up(connected)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        nonce = secrets.token_bytes(NONCE_BYTES)
        await _send(connected, Challenge(VERSION, nonce))
        hello: Hello = await _receive(connected, Hello)
        said = nonce, hello.nonce, hello.version, hello.rank
        try:
            if hello.version != VERSION:
                raise HandshakeError(f"it has asyncllm {hello.version}, rank 0 {VERSION}")
            if not hmac.compare_digest(hello.proof, prove(secret, "joiner", *said)):
                raise HandshakeError("its secret is another")
            rank = choose(hello.rank)
        except HandshakeError as error:
            await _send(connected, Refused(str(error)))
            raise
        await _send(connected, Welcome(rank, prove(secret, "rank 0", *said, rank)))
        return rank


def _set_up(connected: socket.socket) -> None:
    connected.setblocking(False)
    for option in OPTIONS:
        connected.setsockopt(*option)


async def _send(connected: socket.socket, message: msgspec.Struct) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connected, frame(msgspec.msgpack.encode(message)))


async def _receive(connected: socket.socket, kind: Any) -> Any:
    """One message, and not a byte behind it."""
    (size,) = LENGTH.unpack(await _exactly(connected, LENGTH.size))
    if size > MAX_MESSAGE_BYTES:
        raise HandshakeError(f"a message of {size} bytes is over {MAX_MESSAGE_BYTES}")
    try:
        return msgspec.msgpack.decode(await _exactly(connected, size), type=kind)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"it sent what is no message: {error}") from error


async def _exactly(connected: socket.socket, size: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < size:
        part = await loop.sock_recv(connected, size - len(received))
        if not part:
            raise HandshakeError("it closed the connection")
        received += part
    return received
