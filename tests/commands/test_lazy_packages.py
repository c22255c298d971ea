"""A lazy package behaves as one that was imported, made-up or real."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncllm.commands import lazy_packages
from asyncllm.commands.fast_start import LAZY_PACKAGES
from asyncllm.commands.lazy_packages import make_lazy
from tests.text.tokenizer_folders import byte_level, write_folder
from tests.waiting import PATIENCE_SECONDS

NAME = "made_up_package"
INIT = "__version__ = '8'\nfrom .part import half\nfrom . import part\nwhole = 2 * half\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT)
    (folder / "part.py").write_text("from . import __version__\nhalf = 21\n")
    (folder / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lazy_packages, "version", lambda distribution: f"7 of {distribution}")
    yield folder
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def test_names_run_init_and_modules_do_not(package: Path) -> None:
    make_lazy(NAME, "made-up")
    part = importlib.import_module(f"{NAME}.part")
    made_up = importlib.import_module(NAME)
    assert part.half == 21 and made_up.part is part
    assert made_up.__version__ == part.__version__ == "7 of made-up"
    assert "whole" not in vars(made_up)
    assert made_up.whole == 42
    assert not hasattr(made_up, "neither") and not hasattr(made_up, "__neither__")
    assert "whole" in dir(made_up)
    importlib.import_module(f"{NAME}.other")
    assert made_up.other.__name__ == f"{NAME}.other"


def test_a_known_name_does_not_run_init(package: Path) -> None:
    make_lazy(NAME, "made-up", {"half": "part"})
    made_up = importlib.import_module(NAME)
    assert made_up.half == 21 and "whole" not in vars(made_up)
    assert made_up.whole == 42 and made_up.half == 21


def test_another_module_in_its_place(package: Path) -> None:
    place = "import sys, types\nother = types.ModuleType(__name__)\nother.whole = 42\n"
    (package / "__init__.py").write_text(f"{place}sys.modules[__name__] = other\n")
    make_lazy(NAME, "made-up")
    made_up = importlib.import_module(NAME)
    assert made_up.whole == 42 and "whole" in dir(made_up)
    assert importlib.import_module(NAME) is not made_up


def test_an_error_is_told_to_everybody_who_asks(package: Path) -> None:
    (package / "__init__.py").write_text("raise RuntimeError('broken')\n")
    make_lazy(NAME, "made-up")
    made_up = importlib.import_module(NAME)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            _ = made_up.whole


def test_two_threads_that_wait_for_each_other(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One runs `__init__`, which waits for a module whose importer reads what is being made."""
    monkeypatch.setattr(lazy_packages, "INIT_SECONDS", 0.1)
    (package / "gate.py").write_text(
        "from threading import Event\nimporting, opening = Event(), Event()\n"
    )
    (package / "__init__.py").write_text(
        f"from . import gate\ngate.opening.set()\nimport {NAME}.asks\nwhole = 42\n"
    )
    (package / "asks.py").write_text(
        f"import {NAME}\nfrom {NAME} import gate\ngate.importing.set()\n"
        f"assert gate.opening.wait({PATIENCE_SECONDS})\ngetattr({NAME}, 'whole', None)\n"
    )
    make_lazy(NAME, "made-up")
    gate = importlib.import_module(f"{NAME}.gate")
    with ThreadPoolExecutor(1) as thread:
        importing = thread.submit(importlib.import_module, f"{NAME}.asks")
        assert gate.importing.wait(PATIENCE_SECONDS)
        assert importlib.import_module(NAME).whole == 42
        with pytest.raises(ImportError, match="waits for this"):
            importing.result(PATIENCE_SECONDS)


def test_what_is_left_as_it_is(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_lazy("no_such_package", "made-up")
    assert "no_such_package" not in sys.modules
    monkeypatch.undo()  # of a distribution that knows no version
    monkeypatch.syspath_prepend(package.parent)
    make_lazy(NAME, "no-such-distribution")
    assert NAME not in sys.modules
    imported = importlib.import_module(NAME)
    make_lazy(NAME, "made-up")
    assert importlib.import_module(NAME) is imported and "whole" in vars(imported)


def test_a_package_in_a_package(package: Path) -> None:
    inner = package / "inner"
    inner.mkdir()
    (inner / "__init__.py").write_text("whole = 42\n")
    (inner / "part.py").write_text("half = 21\n")
    make_lazy(f"{NAME}.inner", "made-up")
    assert NAME not in sys.modules  # of which it would have to run the `__init__`
    make_lazy(NAME, "made-up")
    make_lazy(f"{NAME}.inner", "made-up")
    made_up = importlib.import_module(NAME)
    assert importlib.import_module(f"{NAME}.inner.part").half == 21
    assert "whole" not in vars(made_up) and "whole" not in vars(made_up.inner)
    assert made_up.inner.whole == 42 and "whole" not in vars(made_up)
    assert made_up.whole == 42 and made_up.inner.part.half == 21


def test_known_names_are_those_of_the_package() -> None:
    for package, (_, known) in LAZY_PACKAGES.items():
        for name, module in known.items():
            whole = importlib.import_module(package)
            source = importlib.import_module(f"{package}.{module}")
            assert getattr(whole, name) is getattr(source, name)


def said_by(program: str, *arguments: str) -> object:
    """Its last line, of JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_familys_tokenizer_does_not_read_all_models(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), bos="<s>", eos="</s>", model_type="qwen3")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("PreTrainedTokenizerFast", "Qwen2Tokenizer"))
    program = """
import json, sys
from asyncllm.commands.fast_start import begin_fast_start
begin_fast_start("cpu")
from asyncllm.engine.text.tokenizer import Tokenizer
tokenizer = Tokenizer.from_folder(sys.argv[1])
models = sys.modules["transformers.models"]
before = "_import_structure" in vars(models)
from transformers import Qwen2Tokenizer
from transformers.models import Qwen3Config
same = type(tokenizer._hf) is Qwen2Tokenizer, models.Qwen3Config is Qwen3Config
print(json.dumps([before, *same]))
"""
    assert said_by(program, str(tmp_path)) == [False, True, True]


@pytest.mark.slow
def test_transformers_serves_while_lazy_and_then_runs_init() -> None:
    program = """
import asyncio, json, sys
from asyncllm.commands.fast_start import begin_fast_start
begin_fast_start("cpu")
from asyncllm import AsyncLLMEngine
async def main():
    async with AsyncLLMEngine("tiny", num_gpu_blocks_override=16, swap_space=0) as engine:
        engine.tokenizer.render_chat([{"role": "user", "content": "Hi"}])
asyncio.run(main())
before = "_import_structure" in vars(sys.modules["transformers"])
import transformers
held = transformers
from transformers import AutoTokenizer
print(json.dumps([before, held.AutoConfig.__name__, AutoTokenizer.__module__, held.__version__]))
"""
    import transformers

    assert said_by(program) == [
        False,
        "AutoConfig",
        "transformers.models.auto.tokenization_auto",
        transformers.__version__,
    ]
