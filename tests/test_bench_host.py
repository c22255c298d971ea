"""The host benchmark runs: a real server, clients of another process, a simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import TEST_SECONDS

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_host.py"
ARGS = ["--streams", "3", "--steps", "20", "--device-ms", "1"]


@pytest.mark.slow
def test_it_measures_and_ends_in_a_json_line() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *ARGS],
        capture_output=True,
        text=True,
        timeout=TEST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (row,) = report["rows"]
    assert row["streams"] == 3
    assert all(
        row["us_per_step"][phase] > 0 for phase in ("plan", "build", "text", "emit", "write")
    )
    assert row["us_per_token"] > 0
    assert 0 < row["writes_per_token"] <= 1.1, "one per step, and one of the step before"
    assert row["bytes_per_token"] > 100, "a frame is about 200 bytes"
