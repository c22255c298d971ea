"""The clients of bench_host.py, in a process of their own.

`bench_clients.py PORT STREAMS LAG_PORT BODY ENDS`: each stream posts BODY and reads on, and throws
away what it reads. With ENDS at 1 a stream that has ended posts again, each time another prompt as
long as BODY's; the first answers are of all lengths, so that the ends are spread evenly. Every 2 ms
a packet with the time goes to LAG_PORT: how long it lies there is how long a new request would.
Never ends by itself.
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
TOKEN_IDS = range(300, 2300)  # Python makes no new object for an int up to 256: no client's ids


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


if __name__ == "__main__":
    endless_streams(*sys.argv[1:])
