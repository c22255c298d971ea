"""docs/THREATS.md names tests that exist, and the source holds none of what it rules out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for room in ("asyncllm", "models", "attention", "graphs")
    for path in (ROOT / room).rglob("*.py")
]
NAMED = re.compile(r"`(?:([a-z_/]+\.py))?::(test_\w+)`")
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "os.system"}


def named_tests() -> list[tuple[str, str]]:
    file, found = "", []
    for given, test in NAMED.findall((ROOT / "docs/THREATS.md").read_text()):
        file = given or file
        found.append((file, test))
    return found


def test_every_named_test_exists() -> None:
    tests = named_tests()
    assert len(tests) > 20
    for file, test in tests:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_opens_a_door(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS, f"line {node.lineno}"
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    assert ast.unparse(keyword.value) == "False", f"line {node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "marshal", "shelve", "dill"}, f"line {node.lineno}"
