"""The parts of the GPU timings that need no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.script_module import import_script
from tests.waiting import PATIENCE_SECONDS

SCRIPTS = Path(__file__).parent.parent / "scripts"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); input()"


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_timing = import_script(SCRIPTS / "gpu_timing.py")
    monkeypatch.setattr(gpu_timing, "SHUTDOWN_SECONDS", 0.1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", DEAF], **pipes) as server:
        assert server.stdout is not None and server.stdout.readline()
        gpu_timing.end(server)
        assert server.returncode == -9


def test_shapes_over_http_need_a_tokenizer() -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_shapes.py"), "http"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 2 and "--tokenizer" in done.stderr
