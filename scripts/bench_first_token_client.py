"""The client of bench_first_token.py, in a process of its own, as plain as can be.

`bench_first_token_client.py PORT REQUESTS BURST INPUT_LEN OUTPUT_LEN`: REQUESTS times, BURST
streams are posted at once, each on a connection of its own, and read to their ends. Prints [sent,
first frame read] of each, monotonic seconds, as JSON.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
PATIENCE_S = 60


def exchange(socks: list[socket.socket], bodies: list[bytes]) -> list[list[float]]:
    ready = selectors.DefaultSelector()
    times: list[list[float]] = []
    for sock, body in zip(socks, bodies, strict=True):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\n"
        times.append([time.monotonic()])
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        ready.register(sock, selectors.EVENT_READ, len(times) - 1)
    answers = [b""] * len(socks)
    while ready.get_map():
        events = ready.select(PATIENCE_S)
        for key, _ in events:
            assert isinstance(key.fileobj, socket.socket)
            piece = key.fileobj.recv(1 << 16)
            answers[key.data] += piece
            if not piece:
                raise ConnectionError(f"the server hung up: {answers[key.data]!r}")
            if len(times[key.data]) == 1 and b"data: " in answers[key.data]:
                times[key.data].append(time.monotonic())
            if answers[key.data].endswith(END):
                ready.unregister(key.fileobj)
        if not events:
            raise TimeoutError(f"no end within {PATIENCE_S} s: {answers}")
    return times


def main() -> None:
    port, num_requests, burst, input_len, output_len = (int(arg) for arg in sys.argv[1:6])
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(burst)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {"stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": output_len}
    times: list[list[float]] = []
    for number in range(num_requests):
        # Prompts that differ from their first token on: no prefix is in the cache.
        prompts = [[300 + (number * burst + i) % 2000] * input_len for i in range(burst)]
        bodies = [json.dumps({"prompt": prompt} | options).encode() for prompt in prompts]
        times += exchange(socks, bodies)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
