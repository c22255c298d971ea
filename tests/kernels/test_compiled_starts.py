"""Engines on a fake CUDA device: no step waits for the device, or for a kernel to be compiled.

The tests compile nothing, which would take minutes; `scripts/compile_starts.py` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_starts.py"
SMALL = '{"cuda_graph_sizes": [1, 8, 64], "prefill_graph_sizes": [64, 256], "max_num_seqs": 64}'
# Sinks, windows and MXFP4 experts; latents; scans between graphs; weights and pages of 8 bits.
SHAPES = ["gpt-oss-20b-mxfp4", "deepseek-v2-lite", "mamba2-2.7b", "llama-3.1-8b-fp8-kv8"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_no_request_waits_for_a_kernel_and_no_step_for_the_device(name: str) -> None:
    command = [sys.executable, str(SCRIPT), name, "--no-compile", "--layers=2", f"--args={SMALL}"]
    # Triton's interpreter compiles nothing, and decides when it is imported.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{name}: " in done.stdout and "FAIL" not in done.stdout
