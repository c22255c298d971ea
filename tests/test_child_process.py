"""A child process imports what its parent would, and ends with it from its first moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import run, until

PARENT = """
import socket
import sys
from pathlib import Path

sys.path[:0] = [Path("/nowhere"), "/some/place:elsewhere"]
from asyncllm.child_process import start_child

ours, theirs = socket.socketpair()
with theirs:
    child = start_child("ours", {"GIVEN": "yes"}, theirs)
print(child.pid, flush=True)
print(ours.recv(1000).decode(), flush=True)
sys.exit(child.wait())
"""
CHILD = """
import os, queue, signal, sys
from asyncllm.child_process import given_socket

ignores = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
said = queue.__name__, os.environ["GIVEN"], sys.argv[1], ignores, sys.path[0]
given_socket().send(repr(said).encode())
"""


def start(folder: Path, child: str) -> subprocess.Popen[str]:
    """A script with a module beside it, in a folder with a module that nobody asked for."""
    (folder / "application").mkdir()
    (folder / "application" / "parent.py").write_text(PARENT)
    (folder / "application" / "ours.py").write_text(child)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "queue.py").write_text("raise SystemExit('not what was meant')")
    return subprocess.Popen(
        [sys.executable, folder / "application" / "parent.py"],
        cwd=folder / "elsewhere", stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_it_imports_what_its_parent_would(tmp_path: Path) -> None:
    with start(tmp_path, CHILD) as parent:
        assert parent.stdout is not None
        _, said = parent.stdout.read().splitlines()
    assert said == repr(("queue", "yes", str(parent.pid), True, "/some/place:elsewhere"))
    assert parent.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_parent_while_it_imports(number: int, tmp_path: Path) -> None:
    with start(tmp_path, "import time; time.sleep(600)") as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, number)
        parent.wait()

        async def test() -> None:
            await until(lambda: _is_gone(child))

        run(test())


def _is_gone(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"
