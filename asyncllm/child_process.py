"""Starts child processes that talk to this one over a socket, and end with it.

A child is killed when the thread that started it ends (PR_SET_PDEATHSIG), even if the parent is
killed. It ignores SIGINT and SIGTERM: Ctrl-C reaches all processes of a terminal and SIGTERM all of
a service, but the parent drains first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1
STDERR = 2


def start_child(
    module: str, environment: Mapping[str, str], theirs: socket.socket, *others: socket.socket
) -> subprocess.Popen[bytes]:
    """Start a child that runs `module`, which must call `given_socket`. others: more sockets, for
    `other_sockets`. Raises `OSError`."""
    files = [each.fileno() for each in (theirs, *others)]
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, (os.getpid(), *files))],
        stdin=subprocess.DEVNULL,
        stdout=STDERR,  # stdout is for the application
        pass_fds=files,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def given_socket() -> socket.socket:
    """The child's socket. sys.argv: the parent's process id, the sockets' file descriptors."""
    end_with(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return socket.socket(fileno=int(sys.argv[2]))


def other_sockets() -> list[socket.socket]:
    """In the child, once: those that came with it."""
    return [socket.socket(fileno=int(each)) for each in sys.argv[3:]]


def end_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(0)
