"""The wheel has every file of the package, and an install of it that is not editable serves.

The install is an environment of its own, which finds what asyncllm depends on where this process
does, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from asyncllm.kernels import nvcc
from tests.server.process import served
from tests.waiting import PATIENCE_SECONDS, TEST_SECONDS

ROOT = Path(__file__).parent.parent
FOLDERS = {"asyncllm": "asyncllm"} | {
    room: f"asyncllm/{room}" for room in ("models", "attention", "graphs")
}
BESIDE = ("pyproject.toml", "README.md", "LICENSE")
# Sources are compiled for a model's shapes. These are common ones; who knows none ignores them.
COMPILE = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import asyncllm
from asyncllm.kernels import nvcc

def is_compiled(source):
    shapes = ("-DHEAD_DIM=128", "-DGROUP_SIZE=4", "-DBLOCK_SIZE=16")
    return nvcc.Library(source, (9, 0), shapes).load() is not None

folder = Path(asyncllm.__file__).parent
sources = sorted(folder.rglob("*.cu"))
with ThreadPoolExecutor(2) as threads:
    compiled = list(threads.map(is_compiled, sources))
print(json.dumps([str(folder), dict(zip(map(str, sources), compiled))]))
"""


def package_files() -> dict[str, Path]:
    """Name in the wheel -> file, of all that lies in the package's folders."""
    files = {}
    for folder, place in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                files[f"{place}/{file.relative_to(ROOT / folder)}"] = file
    return files


def tracked_files() -> set[Path]:
    """Files that git tracks below those folders; none where this is no checkout."""
    done = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--", *FOLDERS], capture_output=True, text=True
    )
    return {file for name in done.stdout.split("\0") if name and (file := ROOT / name).exists()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what an earlier build has left in the checkout would be packed again."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in BESIDE:
        shutil.copy(ROOT / name, folder / "source")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-q", "-w", str(folder)]
    run(sys.executable, "-m", "pip", "wheel", *options, str(folder / "source"))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of an environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    made = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "-q"]
    run(sys.executable, "-m", "pip", "--python", str(made), "install", *options, str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    # Folders that a .pth file names are searched last, and their own .pth files (that of an
    # editable install) are not read.
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others))
    return made


def run(*command: str, **env: str) -> str:
    """Its output, in a folder without asyncllm's sources."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd="/", env={**clean, **env}, capture_output=True, text=True, timeout=TEST_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file(wheel: Path) -> None:
    files = package_files()
    assert tracked_files() <= set(files.values())
    assert {file.suffix for file in files.values()} >= {".py", ".cu", ".cuh", ".js", ".json"}
    with ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        assert names == files.keys()
        assert all(packed.read(name) == file.read_bytes() for name, file in files.items())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["", "--tensor-parallel-size=2", "--data-parallel-size=2"])
def test_an_install_serves(
    sizes: str, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks and engines are of the install, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", str(python))
    place = run(str(python), "-c", "import asyncllm; print(asyncllm.__file__)")
    assert Path(place).is_relative_to(python.parent.parent)
    question = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    backend = ("--data-parallel-backend=mp",) if "data" in sizes else ()
    with served(*filter(None, (sizes, *backend))) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps({"model": "tiny", **question}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
            answer = json.load(response)
    assert "Paris" in answer["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.skipif(nvcc.find_compiler() is None, reason="no nvcc here")
def test_an_install_compiles_its_cuda_sources(python: Path, tmp_path: Path) -> None:
    folder, compiled = json.loads(run(str(python), "-c", COMPILE, XDG_CACHE_HOME=str(tmp_path)))
    listed = {f"asyncllm/{Path(source).relative_to(folder)}" for source in compiled}
    assert listed == {name for name in package_files() if name.endswith(".cu")}
    assert all(compiled.values()), compiled
