"""A lazy package's modules can be imported before its own `__init__` has run.

The `__init__` of transformers reads a table of all its models, that of its models all their
sources, FlashInfer's imports the Python of all its kernels: a second of a start, for nothing that
is served. Their modules need nothing of it, or only names whose module is known. An import of what
only `__init__` defines (`from transformers import AutoTokenizer`) runs it first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from threading import RLock
from types import ModuleType

INIT_SECONDS = 30.0  # longer than any package's `__init__` takes


def make_lazy(package: str, distribution: str, known: Mapping[str, str] | None = None) -> None:
    """Does nothing where the package is missing or imported, or where its parent is not lazy.

    distribution: its name where it was installed from, which knows its `__version__`.
    known: names that `__init__` defines -> the module of the package that they are from; reading
    one does not run `__init__`.
    """
    parent, _, name = package.rpartition(".")
    if package in sys.modules or (parent and not isinstance(sys.modules.get(parent), _LazyPackage)):
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _LazyPackage
    try:
        module.__dict__["__version__"] = version(distribution)  # their modules ask for it
    except PackageNotFoundError:  # installed without metadata
        return
    module.__dict__["_known"] = dict(known or {})
    sys.modules[package] = module
    if parent:
        setattr(sys.modules[parent], name, module)


class _LazyPackage(ModuleType):
    """Runs `__init__` at the first attribute that it lacks. Its modules become attributes of it."""

    _init_lock = RLock()
    _is_initialized = False
    _known: dict[str, str]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system looks for some, as in any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self._known:
            return getattr(importlib.import_module(f"{self.__name__}.{self._known[name]}"), name)
        module = self._initialized()
        return super().__getattribute__(name) if module is self else getattr(module, name)

    def __dir__(self) -> list[str]:
        module = self._initialized()
        return list(super().__dir__()) if module is self else dir(module)

    def _initialized(self) -> ModuleType:
        """Returns itself, or what `__init__` has put in its place, as transformers' does."""
        self._run_init()
        return sys.modules[self.__name__]

    def _run_init(self) -> None:
        # The thread that holds the lock may wait for a module that this thread is importing: an
        # error instead of a deadlock.
        if not self._init_lock.acquire(timeout=INIT_SECONDS):
            raise ImportError(f"{self.__name__} is being imported by a thread that waits for this")
        try:
            if self._is_initialized:
                return
            self._is_initialized = True  # `__init__` may read what it is about to define
            try:
                assert self.__spec__ is not None and self.__spec__.loader is not None
                self.__spec__.loader.exec_module(self)
            except BaseException:  # the next attribute fails alike
                self._is_initialized = False
                raise
        finally:
            self._init_lock.release()
