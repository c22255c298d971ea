"""The clients of bench_host.py, in a process of their own: they take streams and throw them away.

`bench_host_clients.py PORT STREAMS LAG_PORT BODY`: each stream posts BODY and reads what comes.
Every 2 ms a packet with the time goes to LAG_PORT: how long it lies there is how long a new request
would. Prints the bytes of each second, never ends by itself.
"""

from __future__ import annotations

import selectors
import socket
import struct
import sys
import threading
import time

PROBE_INTERVAL_S = 0.002


def probe(lag_port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", lag_port))
        while True:
            time.sleep(PROBE_INTERVAL_S)
            sock.send(struct.pack("d", time.perf_counter()))


def main() -> None:
    port, num_streams, lag_port = (int(arg) for arg in sys.argv[1:4])
    body = sys.argv[4].encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    ready = selectors.DefaultSelector()
    for _ in range(num_streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        sock.setblocking(False)
        ready.register(sock, selectors.EVENT_READ)
    threading.Thread(target=probe, args=(lag_port,), daemon=True).start()
    while True:
        for key, _ in ready.select():
            assert isinstance(key.fileobj, socket.socket)
            if not key.fileobj.recv(1 << 16):
                return  # the server is gone


if __name__ == "__main__":
    main()
