"""The client of bench_first_token.py, in a process of its own, as plain as can be.

`bench_first_token_client.py PORT REQUESTS BURST INPUT_LEN OUTPUT_LEN RUNNING`: REQUESTS times,
BURST streams are posted at once, each on a connection of its own, and read to their ends, while
RUNNING others go on. Prints [sent, first frame read] of each, monotonic seconds, as JSON.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
PATIENCE_S = 60
OPTIONS = {"stream": True, "ignore_eos": True, "temperature": 0}
RUNNING_PROMPT = [5, 6, 7]
RUNNING_TOKENS = 3500


def post(sock: socket.socket, body: dict[str, object]) -> None:
    data = json.dumps(body | OPTIONS).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\n"
    sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)


def exchange(
    ready: selectors.BaseSelector, socks: list[socket.socket], bodies: list[dict[str, object]]
) -> list[list[float]]:
    times: list[list[float]] = []
    for sock, body in zip(socks, bodies, strict=True):
        times.append([time.monotonic()])
        post(sock, body)
        ready.register(sock, selectors.EVENT_READ, len(times) - 1)
    answers = [b""] * len(socks)
    num_open = len(socks)
    while num_open:
        events = ready.select(PATIENCE_S)
        for key, _ in events:
            assert isinstance(key.fileobj, socket.socket)
            piece = key.fileobj.recv(1 << 16)
            if key.data is None:
                if piece.endswith(END):
                    raise ValueError("a running stream ended: ask for fewer requests")
                continue
            answers[key.data] += piece
            if not piece:
                raise ConnectionError(f"the server hung up: {answers[key.data]!r}")
            if len(times[key.data]) == 1 and b"data: " in answers[key.data]:
                times[key.data].append(time.monotonic())
            if answers[key.data].endswith(END):
                ready.unregister(key.fileobj)
                num_open -= 1
        if not events:
            raise TimeoutError(f"no end within {PATIENCE_S} s: {answers}")
    return times


def main() -> None:
    port, num_requests, burst, input_len, output_len, running = map(int, sys.argv[1:7])
    ready = selectors.DefaultSelector()
    for _ in range(running):
        sock = connected(port)
        post(sock, {"prompt": RUNNING_PROMPT, "max_tokens": RUNNING_TOKENS})
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


def connected(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


if __name__ == "__main__":
    main()
