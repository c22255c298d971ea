"""The processes that compile ahead of an import leave what the import would have left."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from asyncllm.commands import import_walk
from asyncllm.commands.import_walk.code_imports import imports_of
from asyncllm.commands.import_walk.share_out import compile_all
from asyncllm.commands.import_walk.walk import Walk
from asyncllm.commands.import_walk.worker import Worker
from tests.waiting import PATIENCE_SECONDS

PYCACHE = shutil.ignore_patterns("__pycache__")
SIGN = "import_walk/__main__"
MANY = 3000  # more modules than are compiled while a process is told to end


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A package that imports its own modules, one of them broken, and a namespace package."""
    folder = tmp_path / "modules"
    texts = {
        "ours/__init__.py": "",
        "ours/first.py": "import pkg.second\nfrom . import fifth\ndef f():\n    import sixth\n",
        "ours/fifth.py": "",
        "pkg/__init__.py": "from .third import x\ndef f():\n    import never\n",
        "pkg/second.py": "import space.fourth, broken, sys\ntry:\n    import nowhere\nexcept"
        " ImportError:\n    pass\n",
        "pkg/third.py": "x = 1\n",
        "space/fourth.py": "",
        "broken.py": "def f(:\n",
        "closed/__init__.py": "import never\n",
        "closed/part.py": "",
        "sixth.py": "import closed.part\n",
        "never.py": "",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


ORDER = (
    "ours", "ours.first", "pkg", "pkg.third", "pkg.second", "space.fourth", "broken", "ours.fifth",
    "sixth", "closed.part",
)  # fmt: skip


def a_walk(folder: Path) -> Walk:
    path = [str(folder.parent), "nowhere", str(folder)]
    return Walk(path, {"ours": str(folder / "ours")}, ["closed"])


def question(folder: Path, roots: tuple[str, ...] = ("ours.first",)) -> list[str]:
    path = [f"path={folder.parent}", "path=nowhere", f"path={folder}"]
    ours = ["workers=2", f"folder=ours={folder / 'ours'}", "unopened=closed"]
    return [*ours, *path, *(f"root={root}" for root in roots)]


def test_what_is_imported_first_is_taken_first(modules: Path) -> None:
    walk = a_walk(modules)
    walk.add("ours.first", (), (0, 0))
    taken = []
    while (task := walk.take()) is not None:
        name, file, package = task
        taken.append(name)
        assert Path(file).is_relative_to(modules)
        if name != "broken":
            code = compile(Path(file).read_text(), file, "exec")
            walk.add_imports(list(imports_of(code, package)), name)
    assert tuple(taken) == ORDER


def begin(
    folder: Path, cache: Path, asked: list[str], limit: tuple[int, int] | None = None
) -> subprocess.Popen[bytes]:
    """The script, from a folder of its own: it locks a file there. Its input stays open.

    limit: a resource of `setrlimit`, and how much of it there is.
    """
    script = folder.parent / "import_walk" / "__main__.py"
    source = Path(import_walk.__file__).parent
    shutil.copytree(source, script.parent, ignore=PYCACHE, dirs_exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", f"pycache_prefix={cache}", str(script), *asked],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=partial(resource.setrlimit, limit[0], (limit[1],) * 2) if limit else None,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait until it and its workers have ended: all of them have its standard error."""
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(PATIENCE_SECONDS) == 0
    assert process.stdin is not None
    process.stdin.close()
    process.stderr.close()


def kept(cache: Path, folder: Path) -> dict[str, tuple[int, int]]:
    """Bytecode in the cache: the name of its source, its inode and time."""
    place = cache / folder.relative_to("/")
    stats = {file: file.stat() for file in place.rglob("*.pyc")}
    return {
        str(file.relative_to(place)).partition(".")[0]: (stat.st_ino, stat.st_mtime_ns)
        for file, stat in stats.items()
    }


def test_an_import_finds_what_it_would_have_written(modules: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    end(begin(modules, cache, question(modules)))
    before = kept(cache, modules)
    names = {name.replace(".", "/") for name in ORDER if name != "broken"}
    packages = {"ours", "pkg"}
    assert set(before) == (names - packages) | {f"{package}/__init__" for package in packages}
    (modules / "broken.py").write_text("")
    program = f"import sys; sys.path[:0] = [{str(modules)!r}]; import ours.first; ours.first.f()"
    done = subprocess.run(
        [sys.executable, "-v", "-X", f"pycache_prefix={cache}", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
    )
    for name in before:
        if name != "closed/part":  # whose `__init__` imports what it needs
            source = modules / f"{name}.py"
            compiled = importlib.util.cache_from_source(str(source)).rpartition("/")[2]
            assert f"{compiled} matches {source}" in done.stderr
    after = kept(cache, modules)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"broken", "closed/__init__", "never"}


def test_it_leaves_a_sign_when_all_is_compiled(modules: Path, tmp_path: Path) -> None:
    """And no more: bytecode of its own would be cut by a full disk."""
    cache = tmp_path / "cache"
    end(begin(modules, cache, question(modules)))
    assert set(kept(cache, tmp_path / "import_walk")) == {"__main__"}


def test_it_ends_with_its_input(tmp_path: Path) -> None:
    folder, cache = tmp_path / "modules", tmp_path / "cache"
    folder.mkdir()
    names = tuple(f"module_{n}" for n in range(MANY))
    for name in names:
        (folder / f"{name}.py").write_text("def f():\n    return 1\n" * 100)
    process = begin(folder, cache, question(folder, names))
    assert process.stdin is not None
    process.stdin.close()
    assert process.stderr is not None and process.stderr.read() == b""
    assert process.wait(PATIENCE_SECONDS) == 0
    assert len(kept(cache, folder)) < MANY
    assert SIGN not in kept(cache, tmp_path)


def test_it_ends_where_nothing_can_be_kept(modules: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("in the way")
    end(begin(modules, cache, question(modules)))
    assert cache.read_text() == "in the way"


def test_a_full_disk_leaves_no_bytecode_that_was_cut(modules: Path, tmp_path: Path) -> None:
    """A process may write so many bytes to a file: the rest of a longer one is missing."""
    cache, names = tmp_path / "cache", [f"f{n}" for n in range(500)]
    for file in ("ours/first.py", "ours/fifth.py"):
        with open(modules / file, "a") as source:
            source.writelines(f"def {name}(x):\n    return x + 1\n" for name in names)
    end(begin(modules, cache, question(modules), (resource.RLIMIT_FSIZE, 2048)))
    assert set(kept(cache, modules)) == {"ours/__init__"}
    assert SIGN not in kept(cache, tmp_path)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.wait()


def test_a_worker_closes_what_is_open_alone(
    workers: list[Worker], modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all that may be open, which is a billion where nobody has set a limit."""
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 40)
    for _ in range(3):
        workers.append(Worker(workers))
    for worker in workers:
        worker.give(("never", str(modules / "never.py"), ""))
        assert worker.answer() == ("never", [])


def test_one_worker_ends_before_another(workers: list[Worker]) -> None:
    """Whoever is begun later has nothing of those before."""
    for _ in range(3):
        workers.append(Worker(workers))
    for worker in workers[:]:
        worker.close()
        worker.wait()  # for ever, if another had the other end of its pipe
        workers.remove(worker)


def test_a_limit_on_processes(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there end, are waited for, and leave no file open."""
    pids, fork = [], os.fork

    def limited() -> int:
        if len(pids) == 2:
            raise BlockingIOError("Resource temporarily unavailable")
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", limited)
    files = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        compile_all(a_walk(modules), 3)
    assert os.listdir("/proc/self/fd") == files
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_some_folders_may_not_be_written(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a Python of the system's, say, under packages of the user's: no disk is full."""
    walk = a_walk(modules)
    walk.add("ours.first", (), (0, 0))
    assert walk.is_lost("ours.first")
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(modules / "ours"))
    assert not walk.is_lost("ours.first")


def test_one_at_a_time(modules: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "import_walk").mkdir()
    (tmp_path / "import_walk" / "__main__.py").touch()
    with open(tmp_path / "import_walk" / "__main__.py") as script:
        fcntl.flock(script, fcntl.LOCK_EX)
        end(begin(modules, cache, question(modules)))
    assert not kept(cache, modules)


def test_a_second_walk_writes_nothing(modules: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    end(begin(modules, cache, question(modules)))
    before = kept(cache, modules)
    end(begin(modules, cache, question(modules)))
    assert kept(cache, modules) == before
