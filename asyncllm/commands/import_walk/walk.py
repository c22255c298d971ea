"""Which module is compiled next: of those found, the one that a thread would import first.

It finds modules as Python's import does, by the files alone, and imports none.
"""

from __future__ import annotations

import heapq
import os
import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .code_imports import Import

    Place = tuple[int, ...]
    Task = tuple[str, str, str]  # a module's name, its file, its package

LOADERS = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES))


class Walk:
    """Modules that are found and not yet compiled, by the place where they are first imported.

    A place is (1 behind an import in a function, root, number of the import in it and of the
    module in that, number of the import in that module, ...): in the order of places one thread
    comes to them. Functions' imports are followed in our own packages, which use what they import;
    others' are mostly never run.
    """

    def __init__(self, path: list[str], folders: dict[str, str], unopened: list[str]) -> None:
        """folders: our packages and where they are. unopened: whose own `__init__` is not run."""
        self._path = path
        self._folders = folders
        self._unopened = unopened
        self._finders: dict[str, FileFinder] = {}
        self._specs: dict[str, ModuleSpec | None] = {}
        self._places: dict[str, Place] = {}
        self._heap: list[tuple[Place, str]] = []
        self._taken: set[str] = set()

    def add(self, name: str, wanted: tuple[str, ...], place: Place) -> None:
        """An import: the parents first, then the module and what of it are modules too."""
        if self._spec(name) is None:
            return
        parts = name.split(".")
        names = [".".join(parts[: end + 1]) for end in range(len(parts))]
        names += [f"{name}.{part}" for part in wanted]
        for number, module in enumerate(names):
            self._add(module, (*place, number))

    def add_imports(self, imports: list[Import], importer: str) -> None:
        is_deferred, *rest = self._places[importer]
        is_ours = importer.partition(".")[0] in self._folders
        for number, (in_function, name, wanted) in enumerate(imports):
            if is_ours or not in_function:
                self.add(name, wanted, (is_deferred or int(in_function), *rest, number))

    def take(self) -> Task | None:
        """The first that is left."""
        while self._heap:
            _, name = heapq.heappop(self._heap)
            if name not in self._taken:  # as it is where it was met again at an earlier place
                self._taken.add(name)
                spec = self._source(name)
                assert spec is not None and spec.origin is not None
                return name, spec.origin, spec.parent or ""
        return None

    def is_lost(self, name: str) -> bool:
        """Whether there is no bytecode of a compiled module, though it may be written there."""
        spec = self._source(name)
        assert spec is not None and spec.cached is not None
        nearest = spec.cached
        while not os.path.exists(nearest):
            nearest = os.path.dirname(nearest)
        return nearest != spec.cached and os.access(nearest, os.W_OK)

    def _add(self, name: str, place: Place) -> None:
        if name in self._taken or name in self._unopened:
            return
        if self._source(name) is not None and self._places.get(name, (sys.maxsize,)) > place:
            self._places[name] = place
            heapq.heappush(self._heap, (place, name))

    def _source(self, name: str) -> ModuleSpec | None:
        """A module that Python compiles, of a name that a task's line can have."""
        spec = self._spec(name)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        return spec if "\n" not in spec.loader.path else None

    def _spec(self, name: str) -> ModuleSpec | None:
        if name not in self._specs:
            self._specs[name] = self._find(name)
        return self._specs[name]

    def _find(self, name: str) -> ModuleSpec | None:
        """As Python's path finder does, which asks for parents that are imported."""
        portions: list[str] = []
        for folder in self._search_path(name):
            finder = self._finders.get(folder) or FileFinder(folder, *LOADERS)
            spec = self._finders.setdefault(folder, finder).find_spec(name)
            if spec is not None and spec.loader is not None:
                return spec
            portions += (spec and spec.submodule_search_locations) or ()
        if not portions:
            return None
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = portions
        return namespace

    def _search_path(self, name: str) -> list[str]:
        if name in self._folders:
            return [os.path.dirname(self._folders[name])]
        parent = name.rpartition(".")[0]
        if not parent:
            return self._path
        spec = self._spec(parent)
        return (spec and spec.submodule_search_locations) or []
