"""A package whose modules can be imported before its own `__init__` has run.

transformers' `__init__` reads a table of all its models, that of its models all their sources,
FlashInfer's imports all its kernels' Python: a second of a start, for nothing that is served. Their
modules do not need it, or only a name whose module is known. Who asks for what only `__init__`
brings (`from transformers import AutoTokenizer`) has it run first, and notices no difference.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from threading import RLock
from types import ModuleType

OPENING_SECONDS = 30.0  # longer than any package takes


def leave_unopened(package: str, distribution: str, known: Mapping[str, str] | None = None) -> None:
    """For a process that is ours, and only where the package is neither missing nor imported, and
    one that it is part of was left unopened too.

    distribution: its name where it was installed from, which knows its `__version__`.
    known: names that `__init__` brings, each with the module of the package that it is from: to ask
    for one opens nothing.
    """
    parent, _, name = package.rpartition(".")
    if package in sys.modules or (parent and not isinstance(sys.modules.get(parent), _Unopened)):
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Unopened
    try:
        module.__dict__["__version__"] = version(distribution)  # their modules ask for it
    except PackageNotFoundError:  # installed in a way of its own
        return
    module.__dict__["_known"] = dict(known or {})
    sys.modules[package] = module
    if parent:
        setattr(sys.modules[parent], name, module)


class _Unopened(ModuleType):
    """Opens at the first attribute that it does not have. Its modules become attributes of it."""

    _opening = RLock()
    _is_opened = False
    _known: dict[str, str]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system looks for some, as in any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self._known:
            return getattr(importlib.import_module(f"{self.__name__}.{self._known[name]}"), name)
        module = self._opened()
        return super().__getattribute__(name) if module is self else getattr(module, name)

    def __dir__(self) -> list[str]:
        module = self._opened()
        return list(super().__dir__()) if module is self else dir(module)

    def _opened(self) -> ModuleType:
        """Itself, or what `__init__` has put in its place, as transformers' does."""
        self._open()
        return sys.modules[self.__name__]

    def _open(self) -> None:
        # Who has it may wait for a module that the one who asks is importing: rather an error.
        if not self._opening.acquire(timeout=OPENING_SECONDS):
            raise ImportError(f"{self.__name__} is being imported by a thread that waits for this")
        try:
            if self._is_opened:
                return
            self._is_opened = True  # `__init__` may ask for what it is about to make
            try:
                assert self.__spec__ is not None and self.__spec__.loader is not None
                self.__spec__.loader.exec_module(self)
            except BaseException:  # the next to ask is told the same
                self._is_opened = False
                raise
        finally:
            self._opening.release()
