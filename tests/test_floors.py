"""Imports run down the floors of the house, and the parts that promise it know no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parent.parent
# Each package may import those after it. The vocabulary at the bottom is on no floor.
FLOORS = [
    "cli", "commands", "server", "engine", "formats", "worker", "graphs", "models", "attention"
]  # fmt: skip
HOMES = {"models": ROOT / "models", "attention": ROOT / "attention", "graphs": ROOT / "graphs"}


def modules() -> list[tuple[str, Path]]:
    """(floor, file) of every module that is on one."""
    found = [("cli", ROOT / "asyncllm" / "cli.py")]
    for floor in FLOORS[1:]:
        folder = HOMES.get(floor, ROOT / "asyncllm" / floor)
        found += [(floor, file) for file in sorted(folder.rglob("*.py"))]
    return found


def imported_floors(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    parts = [name.split(".") for name in names if name.startswith("asyncllm.")]
    return {part[1] for part in parts if part[1] in FLOORS}


@pytest.mark.parametrize(("floor", "file"), modules(), ids=lambda v: getattr(v, "name", v))
def test_imports_run_down(floor: str, file: Path) -> None:
    above = set(FLOORS[: FLOORS.index(floor)])
    assert not imported_floors(file) & above


def test_vocabulary_is_on_the_ground() -> None:
    for name in (
        "types",
        "step_plan",
        "outputs",
        "sampling_params",
        "param_checks",
        "structured_outputs",
        "errors",
        "config",
        "generation_defaults",
    ):
        assert not imported_floors(ROOT / "asyncllm" / f"{name}.py"), name


def test_scheduler_needs_no_torch() -> None:
    code = (
        "import sys; import asyncllm.engine.scheduler, asyncllm.engine.pipeline; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
