"""Imports run down the floors of the house, and the parts that promise it know no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parent.parent
# Each package may import those after it. The vocabulary at the bottom is on no floor.
FLOORS = [
    "cli", "commands", "server", "engine", "formats", "worker", "graphs", "models", "attention",
    "kernels",
]  # fmt: skip
HOMES = {"models": ROOT / "models", "attention": ROOT / "attention", "graphs": ROOT / "graphs"}
GROUND = sorted(
    file
    for folder in (ROOT / "asyncllm", ROOT / "asyncllm" / "hub")
    for file in folder.glob("*.py")
    if file.stem not in ("__init__", "__main__", "cli")
)


def modules() -> list[tuple[str, Path]]:
    """(floor, file) of every module that is on one."""
    found = [("cli", ROOT / "asyncllm" / name) for name in ("cli.py", "__main__.py")]
    for floor in FLOORS[1:]:
        folder = HOMES.get(floor, ROOT / "asyncllm" / floor)
        found += [(floor, file) for file in sorted(folder.rglob("*.py"))]
    return found


def imported(file: Path) -> set[str]:
    """Names of ours, dotted; wherever in the file they are imported, and for whatever reason."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.startswith("asyncllm.")}


def imported_floors(file: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(file)} & set(FLOORS)


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "asyncllm" else ("asyncllm", *parts))
    return name.removesuffix(".__init__")


def test_imports_run_down() -> None:
    above = {floor: set(FLOORS[:place]) for place, floor in enumerate(FLOORS)}
    found = {str(file): imported_floors(file) & above[floor] for floor, file in modules()}
    assert len(found) > 200
    assert not {file: floors for file, floors in found.items() if floors}


def test_no_two_modules_need_each_other() -> None:
    """Nor by an import in a function, which would only hide it."""
    files = [*GROUND, *(file for _, file in modules())]
    needs = {module_name(file): imported(file) for file in files}
    needs = {name: found & needs.keys() for name, found in needs.items()}
    order = list(TopologicalSorter(needs).static_order())  # raises `CycleError` with the circle
    assert len(order) > 250


def test_the_vocabulary_is_on_the_ground() -> None:
    found = {file.name: imported_floors(file) for file in GROUND}
    assert not {file: floors for file, floors in found.items() if floors}


def test_scheduler_needs_no_torch() -> None:
    code = (
        "import sys; import asyncllm.engine.scheduler, asyncllm.engine.pipeline; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
