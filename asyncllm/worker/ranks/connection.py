"""Rank 0's sockets to the other ranks, served by one thread.

`send` may be called by any thread and never blocks: what the socket does not take at once is sent
by the thread. So a rank that stands still cannot hold up the event loop. A socket may be one end of
a pair or a TCP connection: nothing here asks which.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from asyncllm.frames import Frames
from asyncllm.worker.ranks.messages import Message, decode

READ_BYTES = 1 << 16
MAX_UNSENT_BYTES = 1 << 28  # of steps that a rank does not take
TICK_SECONDS = 0.5


class Peer:
    """The connection to one rank."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.rank = rank
        self.socket = connected
        self.frames = Frames()
        self.last_heard = time.monotonic()
        self.is_lost = False
        self._unsent = bytearray()
        self._lock = threading.Lock()

    def send(self, frame: bytes = b"") -> bool:
        """Whether all is gone; else another call sends the rest. Raises `OSError`."""
        with self._lock:
            self._unsent += frame
            if self._unsent:
                with contextlib.suppress(BlockingIOError):
                    del self._unsent[: self.socket.send(self._unsent)]
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise OSError(f"{len(self._unsent)} bytes wait to be sent")
            return not self._unsent


class PeerThread:
    """Reads from all peers and sends what they did not take.

    `received` gets each message, `lost` a rank and the reason, once each; `tick` is called about
    twice a second; all in the thread, which ends with `close`. `begin` is its first call and
    returns the sockets by rank: processes that it starts live as long as the thread does, as
    PR_SET_PDEATHSIG asks for.
    """

    def __init__(
        self,
        begin: Callable[[], Sequence[socket.socket]],
        received: Callable[[int, Message], None],
        lost: Callable[[int, str], None],
        tick: Callable[[], None],
    ) -> None:
        self._received, self._lost, self._tick = received, lost, tick
        self._begin = begin
        self._peers: list[Peer] = []
        self._lock = threading.Lock()
        self._ours, self._waker = socket.socketpair()
        self._ours.setblocking(False)
        self._closing = False
        self._begun = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="asyncllm-ranks", daemon=True)
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            self.close()
            raise self._error

    @property
    def peers(self) -> list[Peer]:
        """Those that are not lost."""
        return [peer for peer in self._peers if not peer.is_lost]

    def send(self, frame: bytes) -> None:
        """To all ranks."""
        for peer in self.peers:
            try:
                if not peer.send(frame):
                    self._wake()
            except OSError as error:
                self._drop(peer, str(error))

    def close(self) -> None:
        """End the thread and the connections. Not in the thread."""
        self._closing = True
        self._wake()
        self._thread.join()
        for peer in self._peers:
            peer.socket.close()
        self._ours.close()
        self._waker.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _run(self) -> None:
        try:
            sockets = self._begin()
            self._peers = [Peer(rank, each) for rank, each in enumerate(sockets, 1)]
        except BaseException as error:
            self._error = error
            return
        finally:
            self._begun.set()
        while not self._closing:
            self._serve()
            self._tick()

    def _serve(self) -> None:
        until = time.monotonic() + TICK_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._ours, selectors.EVENT_READ)
            for peer in self.peers:
                events = selectors.EVENT_READ
                try:
                    if not peer.send():
                        events |= selectors.EVENT_WRITE
                except OSError as error:
                    self._drop(peer, str(error))
                    continue
                selector.register(peer.socket, events, peer)
            for key, events in selector.select(max(0.0, until - time.monotonic())):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._ours.recv(READ_BYTES)
                elif events & selectors.EVENT_READ:
                    self._read(key.data)

    def _read(self, peer: Peer) -> None:
        try:
            received = peer.socket.recv(READ_BYTES)
            messages = [*map(decode, peer.frames.feed(received))]
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._drop(peer, str(error))
            return
        peer.last_heard = time.monotonic()
        for message in messages:
            self._received(peer.rank, message)
        if not received:
            self._drop(peer, "its connection is closed")

    def _drop(self, peer: Peer, reason: str) -> None:
        with self._lock:
            if peer.is_lost:
                return
            peer.is_lost = True
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)
        self._lost(peer.rank, reason)
