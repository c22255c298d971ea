"""Prints the lines of each package and fails where a group of packages is above its budget.

The budgets are in line_budget.toml. core: Python that one reads to change a
step; python: all of it outside tests; cuda: .cu and .cuh; page: JavaScript that is not vendored.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("asyncllm", "attention", "graphs", "models", "scripts")
CORE = ("attention", "engine", "graphs", "kernels", "models", "worker")
LANGUAGES = {".py": "Python", ".cu": "CUDA", ".cuh": "CUDA", ".js": "JavaScript"}
NOT_CORE = ("asyncllm/engine/text", "asyncllm/engine/structured")


def package_of(file: Path) -> str:
    """Its folder, at most one level below asyncllm, or two in asyncllm/engine."""
    folders = file.relative_to(ROOT).parts[:-1]
    depth = 1 + (folders[0] == "asyncllm") + (folders[:2] == ("asyncllm", "engine"))
    return "/".join(folders[:depth])


def groups_of(package: str, language: str) -> list[str]:
    if language != "Python":
        return [{"CUDA": "cuda", "JavaScript": "page"}[language]]
    room = package.removeprefix("asyncllm").removeprefix("/").split("/")[0]
    is_core = (not room or room in CORE) and package not in NOT_CORE
    return ["core", "python"] if is_core else ["python"]


def main() -> int:
    packages, groups = Counter[tuple[str, str]](), Counter[str]()
    for file in (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")):
        language = LANGUAGES.get(file.suffix)
        if language and file.parent.name != "vendor":
            package, num_lines = package_of(file), file.read_bytes().count(b"\n")
            packages[package, language] += num_lines
            groups.update(dict.fromkeys(groups_of(package, language), num_lines))
    budgets = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    for (package, language), num_lines in sorted(packages.items()):
        print(f"{num_lines:7,} {language:10} {package}")
    for group, budget in budgets.items():
        print(f"{groups[group]:7,} {group:6} of {budget:,}")
    above = [group for group, budget in budgets.items() if groups[group] > budget]
    if above:
        print(f"above the budget of line_budget.toml: {', '.join(above)}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
