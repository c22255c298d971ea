"""Child processes that are forked from one which has the imports, in place of started by Python.

To import torch and transformers takes a child 3 s of CPU, and hundreds of tests start some. What a
child does after its imports is all its own. Tests of how children start and end have `true_start`.

test process --> this process, which imports --> fork --> fork: the child
     ^------------- the parent of the child, as of one that it has started itself -----'
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from asyncllm.child_process import STDERR, begin

PRELOADED = (
    "asyncllm.worker.ranks.follower", "asyncllm.engine.data_parallel.process", "asyncllm.hf_config",
)  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 1 << 20
MAX_FILES = 20
ROOM_BYTES = 500  # for a child's command line


class ForkedChild:
    """It does what `start_child`'s callers ask of `subprocess.Popen`."""

    def __init__(self, process_id: int) -> None:
        self.pid = process_id
        self._handle = os.pidfd_open(process_id)
        self._lock = threading.Lock()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        polled = select.poll()
        polled.register(self._handle, select.POLLIN)
        if not polled.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        with self._lock:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(self._handle)
        return self._code

    def kill(self) -> None:
        with self._lock:
            if self._code is None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Forks:
    """The process that forks, from its parent's side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()),
                 " " * ROOM_BYTES],
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip

    def start_child(
        self,
        module: str,
        environment: Mapping[str, str],
        theirs: socket.socket,
        *others: socket.socket,
    ) -> ForkedChild:
        """As `asyncllm.child_process.start_child`."""
        message = json.dumps([module, {**os.environ, **environment}]).encode()
        with self._lock:
            _adopt_orphans(True)
            files = [STDERR, *(each.fileno() for each in (theirs, *others))]
            socket.send_fds(self._socket, [message], files)
            process_id = int(self._socket.recv(MESSAGE_BYTES))
            self._socket.recv(MESSAGE_BYTES)  # now it is adopted
            _adopt_orphans(False)
        return ForkedChild(process_id)


def _adopt_orphans(whether: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(whether))


@cache
def forks() -> Forks:
    return Forks()


def start_child(*args: Any) -> ForkedChild:
    return forks().start_child(*args)


def fork_for_ever(parent: socket.socket, parent_id: int) -> str:
    """Returns in each child, with the module that it is to run."""
    while True:
        message, files, _, _ = socket.recv_fds(parent, MESSAGE_BYTES, MAX_FILES)
        if not message:  # the parent has ended
            os._exit(0)
        if (between := os.fork()) == 0:
            between = os.getpid()
            if (child := os.fork()) == 0:
                break
            parent.send(str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        parent.send(b"ended")
        for file in files:
            os.close(file)
    while os.getppid() == between:  # until that ends
        os.sched_yield()
    module, environment = json.loads(message)
    stderr, *theirs = files
    become([sys.executable, "-m", module, str(parent_id), *map(str, theirs)], environment)
    os.dup2(stderr, 1)
    os.dup2(stderr, STDERR)
    os.close(stderr)
    parent.close()
    os.setsid()
    begin(parent_id)
    return module


def become(command: list[str], environment: dict[str, str]) -> None:
    """For this program and for those who read /proc."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command[2:]
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])
    said = "\0".join(command).encode()
    assert len(said) < end - start
    ctypes.memmove(start, said.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    for name in PRELOADED:
        __import__(name)
    assert threading.active_count() == 1
    own_module = fork_for_ever(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[1]))
    sys.modules.pop(own_module, None)  # as __main__ it is run anew
    runpy.run_module(own_module, run_name="__main__", alter_sys=True)
