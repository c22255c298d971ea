"""What is not done at an import changes nothing for who asks later."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from asyncllm.commands import spared
from asyncllm.commands.spared import COMMAND_LINE, Distributions, spare_libraries
from tests.waiting import PATIENCE_SECONDS


def test_a_mapping_like_that_of_python() -> None:
    real, ours = importlib.metadata.packages_distributions(), Distributions()
    assert ours.get("torch", []) == real["torch"]
    assert "_all" not in vars(ours), "the one that is asked for was searched for"
    assert ours.get("no_such_package", []) == [] and "pytest" in ours
    assert dict(ours) == dict(real) and len(ours) == len(real)


def test_libraries_are_imported_without() -> None:
    program = """
import sys
from asyncllm.commands import spared
spared._read_all = lambda: sys.exit("every distribution was read")
spared.spare_libraries()
import httpx, transformers.tokenization_utils_base
assert not {"click", "rich", "pygments"} & sys.modules.keys()
assert callable(httpx.main) and httpx.Client().build_request("GET", "http://a/").url.host == "a"
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("is_imported, version", [(True, "0.28.1"), (False, "1.0"), (False, None)])
def test_an_httpx_that_is_there_or_unknown(
    is_imported: bool, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version_of(distribution: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version

    monkeypatch.setattr(importlib.metadata, "packages_distributions", spared._read_all)
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.delitem(sys.modules, COMMAND_LINE, raising=False)
    if is_imported:
        monkeypatch.setitem(sys.modules, "httpx", sys)
    else:
        monkeypatch.delitem(sys.modules, "httpx", raising=False)
    spare_libraries()
    assert COMMAND_LINE not in sys.modules
    assert importlib.metadata.packages_distributions is Distributions
