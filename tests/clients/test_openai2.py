"""openai 2.x, which scripts/setup installs beside 3.x, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.questions import SUM_ANSWER, WEATHER_ARGUMENTS
from tests.waiting import TEST_SECONDS

ROOT = Path(__file__).parent.parent.parent
OPENAI2 = Path(sys.prefix) / "openai2"


@pytest.mark.skipif(not OPENAI2.is_dir(), reason="scripts/setup test installs openai 2.x there")
def test_answers(tiny: str) -> None:
    paths = os.pathsep.join([str(OPENAI2), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.clients.openai2_script", tiny],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=TEST_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("version").startswith("2.")
    called = found.pop("called")
    assert (called["name"], json.loads(called["arguments"])) == ("get_weather", WEATHER_ARGUMENTS)
    assert found == {
        "whole": SUM_ANSWER,
        "streamed": SUM_ANSWER,
        "streamed_city": "Paris",
        "finish_reason": "tool_calls",
        "is_person": True,
        "param": "temperature",
        "models": ["tiny"],
    }
