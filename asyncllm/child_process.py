"""Starts child processes that end with this one; most talk to it over a socket.

A child is killed when the thread that started it ends (PR_SET_PDEATHSIG), even if the parent is
killed. It ignores SIGINT and SIGTERM: Ctrl-C reaches all processes of a terminal and SIGTERM all of
a service, but the parent drains first. It imports what this one would: from its `sys.path`, and
from the current folder only if that is in there.

This file is the program that a child runs first. It imports nothing that takes time, so that a
parent that ends while a child starts takes it along.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1
STDERR = 2
SYS_PATH = "ASYNCLLM_SYS_PATH"  # the variable that brings the parent's to the child


def start_child(
    module: str, environment: Mapping[str, str], theirs: socket.socket, *others: socket.socket
) -> subprocess.Popen[bytes]:
    """Start a child that runs `module`, which must call `given_socket`. others: more sockets, for
    `other_sockets`. Raises `OSError`."""
    files = [each.fileno() for each in (theirs, *others)]
    return subprocess.Popen(
        [*child_command(module), *map(str, files)],
        stdin=subprocess.DEVNULL,
        stdout=STDERR,  # stdout is for the application
        pass_fds=files,
        env={**child_environment(), **environment},
        start_new_session=True,
    )


def child_command(module: str) -> list[str]:
    return [sys.executable, "-P", __file__, module, str(os.getpid())]


def child_environment() -> dict[str, str]:
    paths = (path or os.getcwd() for path in sys.path if isinstance(path, str))
    return {**os.environ, SYS_PATH: "\n".join(paths)}


def main() -> None:
    """In the child. sys.argv: its module, the parent's process id, and what the module takes."""
    del sys.argv[0]
    begin(int(sys.argv[1]))
    sys.path[:] = os.environ.pop(SYS_PATH).split("\n")
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def begin(parent: int) -> None:
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def given_socket() -> socket.socket:
    """In the child: its socket. sys.argv: the parent's process id, the sockets' descriptors."""
    return socket.socket(fileno=int(sys.argv[2]))


def other_sockets() -> list[socket.socket]:
    """In the child, once: those that came with it."""
    return [socket.socket(fileno=int(each)) for each in sys.argv[3:]]


def end_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(0)


if __name__ == "__main__":
    main()
