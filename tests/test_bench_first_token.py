"""The first token's benchmark runs: a real server, a client of another process, stamped stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.waiting import TEST_SECONDS

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_first_token.py"


def test_it_measures_each_stage_and_ends_in_a_json_line() -> None:
    args = ["--requests", "5", "--burst", "2", "--input-len", "20", "--output-len", "4"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *args],
        capture_output=True,
        text=True,
        timeout=TEST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    us = json.loads(done.stdout.splitlines()[-1])["us"]
    in_order = ("receive", "parse", "wake", "launch", "emit", "deliver")  # whatever the device does
    # Of a burst of two, the one sent first may be read last: then one of its stages is negative.
    assert all(us[stage]["p50"] > 0 for stage in in_order), us
    assert us["launch"]["p20"] >= 700, "the simulated launch"
    assert us["total"]["p20"] >= 1400, "the simulated step"
