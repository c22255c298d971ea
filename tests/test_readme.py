"""README's code runs as written, its flags exist, and it stays short."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncllm.cli import main
from tests.server.process import served
from tests.waiting import PATIENCE_SECONDS, TEST_SECONDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The code after the comment `<!-- tested: name -->`."""
    found = re.search(rf"<!-- tested: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, name
    return found[1]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TEST_SECONDS, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_application() -> None:
    assert "Paris" in run_python(block("application"))


@pytest.mark.slow
def test_batch() -> None:
    lines = run_python(block("batch")).splitlines()
    assert len(lines) == 8 and "4 + 4 = 8" in lines[4]


def test_openai_client_against_the_command() -> None:
    with served() as (process, url, _):
        code = block("openai").replace("http://127.0.0.1:8000", url)
        assert url in code and "12 + 30 = 42" in run_python(code)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--[a-z]+(?:-[a-z]+)+", README))))
def test_flags_exist(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    assert flag in capsys.readouterr().out


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_scripts_are_executable() -> None:
    for name in ("demo", "test", "setup", "loadtest.py", "gpu_check.py"):
        assert os.access(ROOT / "scripts" / name, os.X_OK), name
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_setup_takes_a_python_that_runs(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    setup = Path(shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts"))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(shutil.which(name) or name)

    def run(**python: int) -> str:
        """Programs by their exit codes; what is said, that of `-m venv` included."""
        for name, code in python.items():
            script = f'#!/bin/bash\n[ "$1" != -m ] || echo {name} "$@"\nexit {code}\n'
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)
        done = subprocess.run(
            [setup], capture_output=True, text=True, env={"PATH": str(programs)}, check=False
        )
        assert done.returncode != 0
        return done.stdout + done.stderr

    assert "no Python 3.11 to 3.14" in run(**{"python3.11": 1, "python3": 1})
    assert run(**{"python3.13": 0}).startswith("python3.13 -m venv .venv")
