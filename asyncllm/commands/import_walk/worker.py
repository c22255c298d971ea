"""A child process that compiles, one module after another, and answers with what each imports."""

from __future__ import annotations

import os
from importlib.machinery import SourceFileLoader

from .code_imports import imports_of, read, written

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from .code_imports import Import
    from .walk import Task

NICENESS = 10  # the start's own threads come first
FAILED = "?\n"


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
                os.close(ours)
                os.close(answers)
                compile_modules(tasks, theirs)
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
        return self._name, None if line == FAILED else read(line)

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


def compile_modules(tasks_file: int, answers_file: int) -> None:
    """Each task, until there come no more."""
    os.nice(NICENESS)
    with os.fdopen(tasks_file, "rb") as tasks, os.fdopen(answers_file, "wb") as answers:
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
