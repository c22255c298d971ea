"""The process that compiles modules before the start beside which it runs comes to import them.

A script for an interpreter without site-packages, so nothing of ours can be imported here;
compile_ahead.py starts it. It runs none of the modules: Python's own loader reads, compiles and
writes them, so that what lies in the cache is what an import would have left there, and the imports
in their code are followed. What one importing thread needs first is compiled first. It ends when
all is compiled, or when its input does: with the process that started it.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from opcode import opmap

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest here
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType

    from _typeshed import ReadableBuffer

    Place = tuple[int, ...]
    Import = tuple[bool, str, tuple[str, ...]]  # in a function, of which module, what is taken
    Task = tuple[str, str, str]  # a module's name, its file, its package

NICENESS = 10  # of the workers: the start's own threads come first
END_OF_INPUT = 0
FAILED = "?\n"
LOADERS = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES))
IN_FUNCTION = 0x1  # CO_OPTIMIZED of a code's flags; the body of a class runs at once
ATTRIBUTE_SHIFT = 1 if sys.version_info >= (3, 12) else 0  # the lowest bit: a method to call
JUMPS = {"POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE"}  # 3.12's name, 3.11's
OF_INTEREST = {"LOAD_CONST", "LOAD_NAME", "LOAD_ATTR", "IMPORT_NAME", *JUMPS}
NAMES = {op: name for name, op in opmap.items() if name in OF_INTEREST}


# --- what a module imports --------------------------------------------------------------------


def imports_of(code: CodeType, package: str, in_function: bool = False) -> Iterator[Import]:
    """In order, those of functions and classes after the others; none for type checkers alone.

    package: what relative names are relative to.
    """
    if opmap["IMPORT_NAME"] in code.co_code[::2]:
        for level, name, wanted in _import_statements(code):
            if level:
                kept = package.count(".") + 2 - level
                name = ".".join([*package.split(".")[:kept], name]).rstrip(".")
            yield in_function, name, wanted
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            deferred = in_function or bool(constant.co_flags & IN_FUNCTION)
            yield from imports_of(constant, package, deferred)


def _import_statements(code: CodeType) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(level, name, what is taken), as the two constants before an import and itself have them."""
    before, last = None, None
    is_typing, skipped_until = False, 0
    for offset, op, arg in _instructions(code.co_code):
        if offset < skipped_until:
            continue
        name = NAMES.get(op)
        if name == "LOAD_CONST":
            before, last = last, code.co_consts[arg]
        elif name == "IMPORT_NAME" and isinstance(before, int):
            yield before, code.co_names[arg], last if isinstance(last, tuple) else ()
        elif name in JUMPS and is_typing:
            skipped_until = offset + 2 + 2 * arg
        loaded = arg >> ATTRIBUTE_SHIFT if name == "LOAD_ATTR" else arg
        is_typing = name in ("LOAD_NAME", "LOAD_ATTR") and code.co_names[loaded] == "TYPE_CHECKING"


def _instructions(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """(offset, operation, argument)."""
    extended = 0
    for offset in range(0, len(raw), 2):
        op, arg = raw[offset], raw[offset + 1] | extended
        extended = arg << 8 if op == opmap["EXTENDED_ARG"] else 0
        if op not in (opmap["EXTENDED_ARG"], opmap["CACHE"]):
            yield offset, op, arg


# --- which module is next ---------------------------------------------------------------------


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


# --- several processes ------------------------------------------------------------------------


class Worker:
    """A child that compiles, one module at a time. It ends at the latest with this process.

    others: that this process has begun before; a pipe ends when nobody else has its other end.
    """

    def __init__(self, others: list[Worker]) -> None:
        tasks, ours = os.pipe()
        answers, theirs = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:  # a container's limit on processes
            for file in (tasks, ours, answers, theirs):
                os.close(file)
            raise
        if self._pid == 0:
            try:
                # By name: to close all that there may be is a billion calls in some containers.
                for other in others:
                    other.close()
                os.dup2(tasks, 0)
                os.dup2(theirs, 1)
                for file in (tasks, ours, answers, theirs):
                    os.close(file)
                compile_modules()
            finally:
                os._exit(0)
        os.close(tasks)
        os.close(theirs)
        self._tasks = os.fdopen(ours, "wb", buffering=0)
        self.answers = os.fdopen(answers, "rb")
        self._name = ""

    def give(self, task: Task) -> None:
        self._name = task[0]
        self._tasks.write(os.fsencode("\0".join(task)) + b"\n")

    def answer(self) -> tuple[str, list[Import] | None]:
        """Which module was compiled, and its imports; None where it could not be."""
        line = self.answers.readline().decode()
        if not line:
            raise EOFError("a worker has ended")
        return self._name, read_imports(line)

    def close(self) -> None:
        """It ends after the module that it is at."""
        self._tasks.close()
        self.answers.close()

    def wait(self) -> None:
        """After `close`: who has started this process knows nothing of its children."""
        os.waitpid(self._pid, 0)


class Loader(SourceFileLoader):
    """Leaves no bytecode that a full disk has cut, as Python does before 3.12.8: every later import
    of it would fail."""

    def set_data(self, path: str, data: ReadableBuffer, *, _mode: int = 0o666) -> None:
        super().set_data(path, data, _mode=_mode)
        try:
            if os.stat(path).st_size != memoryview(data).nbytes:
                os.unlink(path)
        except OSError:  # it was not written
            pass


def compile_modules() -> None:
    """Each task of standard input, until it ends."""
    os.nice(NICENESS)
    with os.fdopen(0, "rb") as tasks, os.fdopen(1, "wb") as answers:
        for task in tasks:
            name, file, package = os.fsdecode(task[:-1]).split("\0")
            try:
                code = Loader(name, file).get_code(name)
                assert code is not None
                answer = written(imports_of(code, package))
            except Exception:  # another Python's syntax, unreadable: whoever imports it hears of it
                answer = FAILED
            answers.write(answer.encode())
            answers.flush()


def written(imports: Iterable[Import]) -> str:
    """A line, which `read_imports` reads."""
    return (
        "".join(f"{int(flag)} {' '.join((name, *taken))};" for flag, name, taken in imports) + "\n"
    )


def read_imports(line: str) -> list[Import] | None:
    if line == FAILED:
        return None
    parts = [text.split(" ") for text in line.split(";")[:-1]]
    return [(flag == "1", name, tuple(taken)) for flag, name, *taken in parts]


def compile_all(walk: Walk, num_workers: int) -> bool:
    """False if it ended before: with the input, or where a disk is full and bytecode is lost."""
    workers: list[Worker] = []
    try:
        for _ in range(num_workers):
            workers.append(Worker(workers))
        return _share_out(walk, workers)
    finally:
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.wait()


def _share_out(walk: Walk, workers: list[Worker]) -> bool:
    by_file = {worker.answers.fileno(): worker for worker in workers}
    poll = select.poll()
    for file in (END_OF_INPUT, *by_file):
        poll.register(file, select.POLLIN)
    idle = workers[:]
    while True:
        while idle and (task := walk.take()) is not None:
            idle.pop().give(task)
        if len(idle) == len(workers):
            return True
        for file, _ in poll.poll():
            if file == END_OF_INPUT:
                return False
            name, imports = by_file[file].answer()
            idle.append(by_file[file])
            if imports is not None:
                if walk.is_lost(name):
                    return False
                walk.add_imports(imports, name)


def main(arguments: list[str]) -> None:
    """Each argument is what it is, "=" and its value. The input only ends."""
    asked: dict[str, list[str]] = {}
    for argument in arguments:
        kind, _, value = argument.partition("=")
        asked.setdefault(kind, []).append(value)
    folders = dict(folder.split("=", 1) for folder in asked["folder"])
    with open(__file__, "rb") as this:
        try:
            fcntl.flock(this, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another start's process is at it
            return
        except OSError:  # a file system without locks: two do the same work
            pass
        walk = Walk(asked["path"], folders, asked.get("unopened", []))
        for number, root in enumerate(asked["root"]):
            walk.add(root, (), (0, number))
        if compile_all(walk, int(asked["workers"][0])):  # the sign that nothing is left to do
            Loader("import_walk", __file__).get_code("import_walk")


if __name__ == "__main__":
    main(sys.argv[1:])
