"""`asyncllm bench` on the built-in model: a table, and a JSON line that says what was measured."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncllm import cli
from asyncllm.model_config import resolve_model_path

SMALL = ["--num-gpu-blocks-override", "64", "--swap-space", "0", "--load-format", "dummy"]
SHAPE = ["--input-len", "8", "--output-len", "4"]


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["bench", *words, *SMALL]) == 0
    *summary, line = capsys.readouterr().out.splitlines()
    assert 5 < len(summary) < 20 and max(map(len, summary)) <= 160
    assert not any(sign in "".join(summary) for sign in "{}[]'")  # nothing of Python's
    result: dict[str, Any] = json.loads(line)
    return result


def test_latency(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"]
    result = bench(capsys, "latency", *sizes, *SHAPE)
    assert result["bench"] == "latency"
    assert 0 < result["latency_s"]["p10"] <= result["latency_s"]["p99"]
    assert 0 < result["ttft_ms"]["mean"] < 1e3 * result["latency_s"]["p99"]
    assert result["tpot_ms"]["mean"] > 0
    speed = 2 * 4 / result["latency_s"]["mean"]
    assert result["output_tokens_per_s"] == pytest.approx(speed)
    conditions = result["conditions"]
    assert conditions["batch_size"] == 2 and conditions["input_len"] == 8
    assert conditions["device"] in ("cpu", "cuda") and conditions["load_format"] == "dummy"


def test_on_a_terminal_the_json_is_in_a_file_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    words = ["throughput", "--num-prompts", "2", "--output-json", str(tmp_path / "result.json")]
    assert cli.main(["bench", *words, *SHAPE, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "{" not in out and "output tokens/s" in out
    assert json.loads((tmp_path / "result.json").read_text())["bench"] == "throughput"


def test_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, "throughput", "--model", "tiny-draft", "--num-prompts", "5", *SHAPE)
    assert result["requests_per_s"] == pytest.approx(5 / result["seconds"])
    assert result["output_tokens_per_s"] == pytest.approx(5 * 4 / result["seconds"])
    assert result["total_tokens_per_s"] == pytest.approx(5 * 12 / result["seconds"])
    assert result["conditions"]["model"].endswith("tiny-draft")


@pytest.mark.slow
def test_startup(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, "startup", "tiny", "--num-iters", "1")
    assert result["first_start_s"] == result["to_first_token_s"]["mean"]
    assert result["process_s"]["mean"] > result["first_start_s"] > result["phases_s"]["imports"] > 0
    assert {"load", "profile", "kv_cache"} <= result["phases_s"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["latency", "startup"])
def test_a_folder_with_only_a_configuration(
    what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(resolve_model_path("tiny") / "config.json", tmp_path)
    words = [what, str(tmp_path), "--skip-tokenizer-init", "--load-format", "dummy"]
    assert bench(capsys, *words, "--num-iters", "1", *SHAPE)["bench"] == what


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["latency", "--input-len", "5000"], "window"),
        (["latency", "--num-iters", "0"], "num_iters"),
        (["latency", "--num-iters-warmup", "-1"], "num_iters_warmup"),
        (["throughput", "/nowhere/model"], "/nowhere/model"),
        (["startup", "--max-model-len", "999999"], "max_model_len"),
        (["latency", "--output-json", "/nowhere/result.json"], "/nowhere/result.json"),
    ],
)
def test_what_cannot_be_measured(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words, *SMALL]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("asyncllm: error: ")
    assert complaint in error


def test_unknown_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "nothing"])
    assert end.value.code == 2
