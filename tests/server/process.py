"""`asyncllm serve` with the built-in model, in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

MODEL = "tiny"


class Served(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    said: str  # until it listened


@contextmanager
def served(*flags: str, model: str = MODEL, **environment: str) -> Iterator[Served]:
    """On a port that the system chooses: one that was free a moment ago may be taken now."""
    command = [sys.executable, "-m", "asyncllm", "serve", model, "--port", "0"]
    command += ["--swap-space", "0", "--num-gpu-blocks-override", "100", "--device", "cpu", *flags]
    variables = os.environ | environment
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            said = ""
            assert process.stdout is not None
            for line in process.stdout:
                said += line
                if found := re.match(r"listening on (\S+)", line):
                    yield Served(process, found.group(1), said)
                    break
            else:
                pytest.fail(f"the server did not start: {said}")
        finally:
            process.kill()
