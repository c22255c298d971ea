"""The documents agree with the repository: links resolve, and named code exists."""

from __future__ import annotations

import ast
import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs/ARCHITECTURE.md").read_text()
PACKAGES = ("models", "attention", "graphs")  # beside asyncllm/, installed inside it
CELL = re.compile(r"`([\w/]+\.py)(?:: ([\w.]+))?`")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    """Targets of relative links, code left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def file_of(path: str) -> Path:
    if path.startswith("tests/"):
        return ROOT / path
    return (ROOT if path.split("/")[0] in PACKAGES else ROOT / "asyncllm") / path


def defines(path: Path, dotted: str) -> bool:
    """Whether the source has this class, function or method at its top level."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for name in dotted.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", ARCHITECTURE, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def imports_flashinfer(path: Path) -> bool:
    """Directly, or by a name in a string to import."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        if any(str(name).split(".")[0] == "flashinfer" for name in names):
            return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    for link in links(document.read_text()):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_architecture_names_what_exists() -> None:
    cells = CELL.findall(ARCHITECTURE)
    assert len([name for _, name in cells if name]) > 60
    for path, name in cells:
        assert file_of(path).is_file(), path
        assert not name or defines(file_of(path), name), f"{path}: {name}"


def test_the_life_of_a_request_has_ten_steps_that_can_be_imported() -> None:
    text = section("The life of a request")
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(i) for i in range(1, 11)]
    for path, name in CELL.findall(text):
        module = importlib.import_module("asyncllm." + path.removesuffix(".py").replace("/", "."))
        assert callable(reduce(getattr, name.split("."), module)), f"{path}: {name}"


def test_the_files_that_import_flashinfer_are_listed() -> None:
    listed = {file_of(path) for path, _ in CELL.findall(section("FlashInfer"))}
    sources = [
        path for package in ("asyncllm", *PACKAGES) for path in (ROOT / package).rglob("*.py")
    ]
    importing = {path for path in sources if imports_flashinfer(path)}
    assert importing and importing <= listed
