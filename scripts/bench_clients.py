"""The clients of bench_host.py and bench_first_token.py, in a process of their own.

`bench_clients.py endless PORT STREAMS LAG_PORT BODY ENDS`: each stream posts BODY and reads on, and
throws away what it reads. With ENDS at 1 a stream that has ended posts again, each time another
prompt as long as BODY's; the first answers are of all lengths, so that the ends are spread evenly.
Every 2 ms a packet with the time goes to LAG_PORT: how long it lies there is how long a new request
would. Never ends by itself.

`bench_clients.py first-token PORT REQUESTS BURST INPUT_LEN OUTPUT_LEN RUNNING`: REQUESTS times,
BURST streams are posted at once, each on a connection of its own, and read to their ends, while
RUNNING others go on.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import struct
import sys
import threading
import time
from typing import Any

PROBE_INTERVAL_S = 0.002
END = b"\r\n0\r\n\r\n"
DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"
TOKEN_IDS = range(300, 2300)  # Python makes no new object for an int up to 256: no client's ids
PATIENCE_S = 60
OPTIONS = {"stream": True, "ignore_eos": True, "temperature": 0}
RUNNING_PROMPT = [5, 6, 7]
RUNNING_TOKENS = 3500


def connected(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def http_post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


def probe(lag_port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", lag_port))
        while True:
            time.sleep(PROBE_INTERVAL_S)
            sock.send(struct.pack("d", time.perf_counter()))


def other_prompt(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"prompt": random.choices(TOKEN_IDS, k=len(body["prompt"]))}


def endless_streams(*given: str) -> None:
    port, num_streams, lag_port = map(int, given[:3])
    body, ends = json.loads(given[3]), bool(int(given[4]))
    ready = selectors.DefaultSelector()
    for number in range(num_streams):
        first = body
        if ends:
            most = body["max_tokens"]
            first = other_prompt(body) | {"max_tokens": 1 + number * most // num_streams}
        sock = connected(port)
        sock.sendall(http_post(first))
        sock.setblocking(False)
        ready.register(sock, selectors.EVENT_READ)
    threading.Thread(target=probe, args=(lag_port,), daemon=True).start()
    while True:
        for key, _ in ready.select():
            assert isinstance(key.fileobj, socket.socket)
            piece = key.fileobj.recv(1 << 16)
            if not piece:
                return  # the server is gone
            if ends and piece.endswith(END):
                key.fileobj.sendall(http_post(other_prompt(body)))


def exchange(
    ready: selectors.BaseSelector, socks: list[socket.socket], bodies: list[dict[str, object]]
) -> list[list[float]]:
    times: list[list[float]] = []
    for sock, body in zip(socks, bodies, strict=True):
        times.append([time.monotonic()])
        sock.sendall(http_post(body | OPTIONS))
        ready.register(sock, selectors.EVENT_READ, len(times) - 1)
    answers = [b""] * len(socks)
    num_open = len(socks)
    while num_open:
        events = ready.select(PATIENCE_S)
        for key, _ in events:
            assert isinstance(key.fileobj, socket.socket)
            piece = key.fileobj.recv(1 << 16)
            if key.data is None:
                if piece.endswith(DONE):
                    raise ValueError("a running stream ended: ask for fewer requests")
                continue
            answers[key.data] += piece
            if not piece:
                raise ConnectionError(f"the server hung up: {answers[key.data]!r}")
            if len(times[key.data]) == 1 and b"data: " in answers[key.data]:
                times[key.data].append(time.monotonic())
            if answers[key.data].endswith(DONE):
                ready.unregister(key.fileobj)
                num_open -= 1
        if not events:
            raise TimeoutError(f"no end within {PATIENCE_S} s: {answers}")
    return times


def first_tokens(*numbers: str) -> None:
    """Print [sent, first frame read] of each request, monotonic seconds, as JSON."""
    port, num_requests, burst, input_len, output_len, running = map(int, numbers)
    ready = selectors.DefaultSelector()
    for _ in range(running):
        sock = connected(port)
        sock.sendall(http_post({"prompt": RUNNING_PROMPT, "max_tokens": RUNNING_TOKENS} | OPTIONS))
        sock.recv(1 << 16)  # it runs
        ready.register(sock, selectors.EVENT_READ)
    socks = [connected(port) for _ in range(burst)]
    times: list[list[float]] = []
    for number in range(num_requests):
        # Prompts that differ from their first token on: no prefix is in the cache.
        prompts = [[300 + (number * burst + i) % 2000] * input_len for i in range(burst)]
        bodies = [{"prompt": prompt, "max_tokens": output_len} for prompt in prompts]
        times += exchange(ready, socks, bodies)
    print(json.dumps(times))


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    {"endless": endless_streams, "first-token": first_tokens}[kind](*given)
