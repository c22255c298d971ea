"""`asyncllm kernels` where there is nothing to build, and which reason it gives."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from asyncllm import cli
from asyncllm.commands import kernels
from asyncllm.config import EngineArgs


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("action", ["build", "list"])
def test_on_a_cpu(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", action, "tiny"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("nothing to build: there is no CUDA device here")


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(device="cpu").create_engine_config()
    on_cuda = replace(config, device="cuda")
    assert "float32" in str(kernels.nothing_to_build(on_cuda))
    half = replace(on_cuda, dtype="bfloat16")
    for installed, nothing in ((False, True), (True, False)):
        found = object() if installed else None
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        assert (kernels.nothing_to_build(half) is not None) == nothing


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "list", "/nowhere"]) == 1
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_start_loads_what_is_listed() -> None:
    words = ["tiny", "--dtype", "bfloat16", "--num-gpu-blocks-override", "64"]
    built = _in_a_fresh_process("build", *words)  # other tests of this one have loaded others
    assert "also loaded" not in built
    assert "missing" not in _in_a_fresh_process("list", *words)


def _in_a_fresh_process(*words: str) -> str:
    command = [sys.executable, "-m", "asyncllm", "kernels", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
