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


@pytest.mark.slow
def test_shapes_over_http_need_a_tokenizer() -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_shapes.py"), "http"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 2 and "--tokenizer" in done.stderr


def test_figures_of_a_workload() -> None:
    figures = import_script(SCRIPTS / "gpu_timing.py").figures
    spread = {"median": 1.23456, "p99": 9.87654}
    report = {
        "latency_ms": dict.fromkeys(("ttft_from_sent", "tpot", "itl_per_chunk"), spread),
        "output_tokens_per_s": 10.6,
        "total_tokens_per_s": 20.4,
    }
    assert figures({"workload": "lat1", "ready_s": 5.0, "result": report}) == {
        "workload": "lat1", "ready_s": 5.0, "ttft_ms": 1.23, "ttft_p99_ms": 9.88,
        "tpot_ms": 1.235, "itl_p99_ms": 9.88, "output_tokens_per_s": 11, "total_tokens_per_s": 20,
    }  # fmt: skip
    failed = {"workload": "tput", "ready_s": 5.0, "result": {"error": "refused"}}
    assert figures(failed) == {"workload": "tput", "failed": {"error": "refused"}}
