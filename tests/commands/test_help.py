"""`--help` fits a screen and names the groups of flags; `--help=GROUP` shows one."""

from __future__ import annotations

from collections import Counter

import pytest

from asyncllm.cli import main
from asyncllm.commands.flag_groups import GROUPS
from asyncllm.commands.flags import field_names
from asyncllm.config import EngineArgs
from asyncllm.server.args import ServerArgs


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_every_flag_is_in_one_group() -> None:
    grouped = Counter(name for _, names in GROUPS.values() for name in names.split())
    assert set(grouped.values()) == {1}
    assert grouped.keys() == field_names(EngineArgs) | field_names(ServerArgs)


@pytest.mark.parametrize("command", ["serve", "run-batch", "bench", "doctor", "kernels"])
def test_the_overview_is_one_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, command, "--help")
    assert len(text.splitlines()) <= 40 and "--max-num-seqs" not in text
    assert "\n  memory      the device's memory" in text
    assert ("\n  access " in text) == (command in ("serve", "run-batch"))
    assert f"asyncllm {command} --help=GROUP" in text


def test_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "serve", "--help=access")
    assert "--api-key" in text and "--port" not in text


def test_one_flag_by_a_part_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in ("max-num-seqs", "--max_num_seqs", "num-seq"):
        text = shown(capsys, "serve", f"--help={asked}")
        assert text.startswith("--max-num-seqs INT") and "--max-num-batched" not in text
    said = shown(capsys, "serve", "--help=nothing", code=2)
    assert "no flag has that name, and the groups are model, chat," in said


def test_commands_without_groups_have_the_usual_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("chat", "pull", "models"):
        text = shown(capsys, command, "--help")
        assert text.startswith(f"usage: asyncllm {command} [-h]") and "GROUP" not in text
    assert "run-batch" in shown(capsys, "--help")
