"""`asyncllm doctor`: a line per check, exit code 1 for what is missing, the same as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm import cli
from asyncllm.attention.base import AttentionLayer
from asyncllm.commands import doctor, doctor_model
from asyncllm.commands.doctor import examine
from asyncllm.config import EngineArgs
from asyncllm.model_config import BUILTIN_MODELS

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU machine has")


def findings(**args: Any) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in examine(EngineArgs(**args))}


@cpu_only
def test_this_machine_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "tiny"]) == 0
    text = capsys.readouterr().out
    for word in ("python", "torch", "cpu", "weights", "tokens that fit", "no"):
        assert word in text
    assert "MISSING" not in text


@cpu_only
def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    names = [row["name"] for row in report["findings"]]
    assert names == [finding.name for finding in examine(EngineArgs())]
    assert len(set(names)) == len(names)


def test_what_a_model_needs() -> None:
    found = findings(model="tiny", dtype="bfloat16", device="cpu")
    file = BUILTIN_MODELS["tiny"] / "model.safetensors"
    assert found["weights"].value == f"{file.stat().st_size / 2**30:.2f} GiB in bfloat16"
    hf = json.loads((BUILTIN_MODELS["tiny"] / "config.json").read_text())
    per_token = 2 * 2 * hf["num_hidden_layers"] * hf["num_key_value_heads"] * hf["head_dim"]
    assert found["kv per token"].value == f"{per_token} bytes"
    assert found["tokens that fit"].state == "ok"


def test_which_kernel_decodes_which_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    config = EngineArgs(dtype="bfloat16").create_engine_config()
    layers = [AttentionLayer(i, 32, 8, 128, 1.0, 100 if i % 3 else None) for i in range(6)]
    full, window = doctor_model._attention(config, layers)
    assert full.value == "balanced_decode decodes 2 layers like layer 0" and not full.advice
    assert window.value == "paged_decode decodes 4 layers like layer 1"
    assert window.advice == "balanced_decode does not do a window of 100"


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert f"{tmp_path} is no model folder" in text and "MISSING" in text


def test_one_word_of_a_model_whose_error_comes_late(tmp_path: Path) -> None:
    """transformers may know the architecture, and not what its configuration asks for."""
    config = json.loads((BUILTIN_MODELS["tiny"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "nonsense"}))
    found = [each for each in examine(EngineArgs(str(tmp_path))) if each.section == "model"]
    assert [(each.name, each.state) for each in found] == [("name", "MISSING")]
    assert "nonsense" in found[0].value


def test_files_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((BUILTIN_MODELS["tiny"] / "config.json").read_bytes())
    found = findings(model=str(tmp_path), device="cpu")
    assert found["files"].value == "no weights and tokenizer" and found["files"].state == "MISSING"
    given: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    assert findings(model=str(tmp_path), device="cpu", **given)["files"].state == "ok"


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_model, "memory_bytes", lambda: 1 << 20)
    assert findings(model="tiny", device="cpu")["tokens that fit"].state == "MISSING"


def test_versions_outside_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "99.0", "numpy": None}

    def version(name: str) -> str:
        if name not in versions:
            return "1.0"
        if (found := versions[name]) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {finding.name: finding for finding in doctor._packages()}
    assert found["torch"].state == "note" and "<2.14" in found["torch"].advice
    assert found["numpy"].state == "MISSING" and "pip install" in found["numpy"].advice


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "state"),
    [
        (None, None, "ok"),
        (None, "13.0", "ok"),
        ("580", None, "MISSING"),
        ("535", "13.0", "MISSING"),
    ],
)
def test_a_driver_that_torch_cannot_use(
    driver: str | None, torch_cuda: str | None, state: str
) -> None:
    finding = doctor._no_gpu(driver, torch_cuda)
    assert finding.state == state
    assert bool(finding.advice) == (state == "MISSING")


def test_an_old_card() -> None:
    class Properties:
        name, major, minor = "Tesla T4", 7, 5
        total_memory, multi_processor_count = 16 << 30, 40

    assert doctor._device(Properties, 0).state == "MISSING"
    Properties.major, Properties.minor = 9, 0
    assert doctor._device(Properties, 0).state == "ok"


def test_modules_without_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = dict.fromkeys("abc", doctor)
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(modules=modules))
    monkeypatch.setattr(doctor, "MAX_MODULES_WITHOUT_BYTECODE", 2)
    assert doctor.__spec__ is not None
    monkeypatch.setattr(doctor.__spec__, "cached", "/nowhere")
    found = doctor._bytecode()
    assert (found.value, found.state) == ("missing for 3 modules", "note")
    checkout = Path(doctor.__file__).parents[2]  # of an editable install: where the modules are
    assert found.advice.endswith(f"python -m compileall -q {checkout}")
    monkeypatch.setattr(doctor, "MAX_MODULES_WITHOUT_BYTECODE", 3)
    assert doctor._bytecode().state == "ok"


@pytest.mark.slow
def test_a_reader_that_leaves() -> None:
    """As `asyncllm doctor | head -1` does: no traceback, and a shell's code for SIGPIPE."""
    command = [sys.executable, "-m", "asyncllm", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
