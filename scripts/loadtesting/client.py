"""Sends requests and keeps what comes back: a read is stamped, nothing is parsed while load runs.

The exceptions are conversations (the answer is the next turn's history) and requests to be
cancelled (their chunks are counted as `data:` marks). A slow reader has a connection with small
buffers and sleeps between reads, so that its server sees a full socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import aiohttp
import orjson

from loadtesting.record import (
    Capture,
    Conversation,
    Failure,
    Record,
    Request,
    message_of,
    now,
    reason,
)
from loadtesting.settings import Settings
from loadtesting.stream import digest
from loadtesting.workload import with_history

IDLE_CONNECTION_S = 2.0  # below uvicorn's 5, else a POST can meet a connection just closed
SLOW_BUFFER_BYTES = 2048

Sent = tuple[Request, Capture]


class Counter(IntEnum):
    """Places in the counts that processes share."""

    SENT = 0
    DONE = 1
    FAILED = 2
    READS = 3
    BYTES = 4


def open_session(
    settings: Settings, api_key: str | None, slow: bool = False
) -> aiohttp.ClientSession:
    """No limit but the total time. asyncio and uvloop set TCP_NODELAY themselves."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=IDLE_CONNECTION_S,
        socket_factory=small_socket if slow else None,
    )
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    size = SLOW_BUFFER_BYTES if slow else 2**16
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=size
    )


def small_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
    return made


class Client:
    """Sends over two sessions, the second for slow readers; its counts are for who watches."""

    def __init__(
        self,
        settings: Settings,
        session: aiohttp.ClientSession,
        slow_session: aiohttp.ClientSession,
        num_checked: int = 0,
    ) -> None:
        self.settings = settings
        self.session = session
        self.slow_session = slow_session
        self.num_sent = self.num_done = self.num_failed = self.num_reads = self.num_bytes = 0
        self.num_checked = num_checked  # requests below this index keep their text
        self.url = f"{settings.base_url}/v1/{settings.path}"

    def counts(self) -> list[int]:
        """By Counter."""
        return [self.num_sent, self.num_done, self.num_failed, self.num_reads, self.num_bytes]

    async def send(self, request: Request, body: bytes, intended_s: float) -> Capture:
        capture = Capture(intended_s, now(), [], [])
        self.num_sent += 1
        session = self.slow_session if request.slow else self.session
        try:
            async with session.post(self.url, data=body) as response:
                if response.status != 200:
                    kind = f"http_{response.status}"
                    message = message_of(await response.read())
                    capture = capture._replace(failure=Failure(kind, message))
                elif request.slow or request.cancel_after is not None:
                    cancelled = await self.read_unusually(request, response, capture)
                    capture = capture._replace(cancelled=cancelled)
                else:
                    await self.read(response, capture)
        except TimeoutError:
            failure = Failure("timeout", f"not finished after {self.settings.timeout_s} s")
            capture = capture._replace(failure=failure)
        except aiohttp.ClientError as error:
            kind = "no_connection" if isinstance(error, OSError) else "connection_broke"
            capture = capture._replace(failure=Failure(kind, reason(error)))
        self.num_done += 1
        self.num_failed += capture.failure is not None
        return capture

    async def read(self, response: aiohttp.ClientResponse, capture: Capture) -> None:
        times_s, pieces = capture.times_s, capture.pieces
        read = response.content.readany
        while piece := await read():
            times_s.append(now())
            pieces.append(piece)
            self.num_reads += 1
            self.num_bytes += len(piece)

    async def read_unusually(
        self, request: Request, response: aiohttp.ClientResponse, capture: Capture
    ) -> bool:
        """True if it broke off: then the connection is closed, which tells the server."""
        num_chunks = 0
        while piece := await response.content.readany():
            capture.times_s.append(now())
            capture.pieces.append(piece)
            self.num_reads += 1
            self.num_bytes += len(piece)
            num_chunks += piece.count(b"data:")
            if request.cancel_after is not None and num_chunks >= request.cancel_after:
                response.close()
                return True
            if request.slow:
                await asyncio.sleep(len(piece) / self.settings.slow_bytes_per_s)
        return False

    def digest(self, capture: Capture, request: Request, with_text: bool = False) -> Record:
        keep_text = with_text or request.number < self.num_checked
        return digest(capture, request, keep_text, self.settings.token_counts)

    async def converse(self, turns: Conversation, due_s: float | None) -> list[Sent]:
        """The turns in order; due_s None: the first is due now. A failure ends it."""
        sent: list[Sent] = []
        history: list[dict[str, str]] = []
        for request in turns:
            if sent and (failure := sent[-1][1].failure):
                due = sent[-1][1].intended_s
                unsent = Failure("earlier_turn_failed", failure.kind)
                sent.append((request, Capture(due, due, [], [], unsent)))
                continue
            body = with_history(request.body, history) if history else request.body
            capture = await self.send(request, body, now() if due_s is None else due_s)
            sent.append((request, capture))
            if len(turns) > 1 and capture.failure is None:
                history += self.exchange(request, capture)
                due_s = now() + self.settings.think_s
                await asyncio.sleep(self.settings.think_s)
        return sent

    def exchange(self, request: Request, capture: Capture) -> list[dict[str, str]]:
        """This turn as history: what was asked and what was really answered."""
        question = orjson.loads(request.body)["messages"][-1]
        answer = self.digest(capture, request, with_text=True).text or ""
        return [question, {"role": "assistant", "content": answer}]

    async def closed_loop(self, conversations: Sequence[Conversation], width: int) -> list[Sent]:
        """An answer lets the next conversation begin, which is then its intended time."""
        waiting = iter(conversations)
        runners = (self.run_through(waiting) for _ in range(min(width, len(conversations))))
        return [sent for done in await asyncio.gather(*runners) for sent in done]

    async def run_through(self, waiting: Iterator[Conversation]) -> list[Sent]:
        sent: list[Sent] = []
        for turns in waiting:
            sent += await self.converse(turns, None)
        return sent

    async def open_loop(
        self, conversations: Sequence[Conversation], due_s: Sequence[float], width: int | None
    ) -> list[Sent]:
        """Arrivals do not wait for answers; what the gate of `width` holds back shows as late."""
        gate = asyncio.Semaphore(width or len(conversations))

        async def in_turn(turns: Conversation, at_s: float) -> list[Sent]:
            async with gate:
                return await self.converse(turns, at_s)

        tasks = []
        for turns, at_s in zip(conversations, due_s, strict=True):
            while (wait_s := at_s - now()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(wait_s)  # uvloop rounds to milliseconds and may wake early
            tasks.append(asyncio.create_task(in_turn(turns, at_s)))
        return [sent for done in await asyncio.gather(*tasks) for sent in done]
