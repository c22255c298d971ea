"""`asyncllm worker --join HOST:PORT`: a rank of a server on another host."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import time

from asyncllm.worker.ranks.handshake import HandshakeError, join, read_secret

logger = logging.getLogger("asyncllm")

HELP = "be a rank of a server on another host"
CONNECT_SECONDS = 5.0  # for one attempt
RETRY_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--join", required=True, metavar="HOST:PORT", type=_address,
        help="the server's --master-addr and --master-port",
    )  # fmt: skip
    parser.add_argument(
        "--join-secret-file", metavar="FILE",
        help="as the server's (default: the environment's ASYNCLLM_JOIN_SECRET)",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, help="which rank to be (default: the next one free)")
    parser.add_argument(
        "--join-timeout", type=float, default=600.0, metavar="SECONDS",
        help="how long to look for the server (default: %(default)g)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Ends with its connection. Raises `ValueError`, `OSError`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # at once: a collective does not run Python
    secret = read_secret(options.join_secret_file)
    connected = _connect(options.join, options.join_timeout)
    try:
        rank = asyncio.run(join(connected, secret, options.rank))
    except TimeoutError as error:
        raise HandshakeError("who answers does not end the handshake in time") from error
    connected.setblocking(True)
    logger.info("joined %s:%d as rank %d", *options.join, rank)
    # torch is behind this import: who may not join need not wait for it.
    from asyncllm.worker.ranks.follower import Follower

    Follower(connected).run()
    return 0


def _connect(address: tuple[str, int], patience_s: float) -> socket.socket:
    """Raises `OSError`."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_connection(address, CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > until:
                host, port = address
                raise OSError(f"no server is reached at {host}:{port}: {error}") from error
            time.sleep(RETRY_SECONDS)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
