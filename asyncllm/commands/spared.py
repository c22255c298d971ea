"""What libraries do where they are imported and no server needs: here it is not done.

A tenth of a second of a start and more, of Python's own time. Each is spared in a way that the
library knows: an optional part that is not there, a mapping that is read when it is asked.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property

# httpx 0 looks for its command line's packages, which others bring (rich, click), and does
# without where one is missing.
COMMAND_LINE = "httpx._main"
KNOWN_HTTPX = "0."
# What transformers (5.17 to 5.22) asks for as it is imported. Its distribution has the same name.
ASKED = "torch"

_read_all = importlib.metadata.packages_distributions


def spare_libraries() -> None:
    """For a process that is ours, before its large imports."""
    if "httpx" not in sys.modules and _httpx_version().startswith(KNOWN_HTTPX):
        sys.modules[COMMAND_LINE] = None  # type: ignore[assignment]  # Python's way to say so
    importlib.metadata.packages_distributions = Distributions


def _httpx_version() -> str:
    try:
        return importlib.metadata.version("httpx")
    except importlib.metadata.PackageNotFoundError:
        return "none"


class Distributions(Mapping[str, list[str]]):
    """Python's `packages_distributions`, which reads what each installed distribution consists of
    (0.09 s for 88 of them), for the version of one package."""

    def __getitem__(self, package: str) -> list[str]:
        return [ASKED] if package == ASKED else self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return _read_all()
