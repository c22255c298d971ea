"""A walk's modules, shared out among workers until there are no more.

One process does it at a time, for all that run this file. Who is done leaves the sign.
"""

from __future__ import annotations

import fcntl
import select

from .walk import Walk
from .worker import Loader, Worker

END_OF_INPUT = 0


def main(script: str, arguments: list[str]) -> None:
    """`script` is locked meanwhile, and its bytecode is the sign. Each argument is what it is, "="
    and its value. The input only ends.
    """
    asked: dict[str, list[str]] = {}
    for argument in arguments:
        kind, _, value = argument.partition("=")
        asked.setdefault(kind, []).append(value)
    with open(script, "rb") as locked:
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another start's process is at it
            return
        except OSError:  # a file system without locks: two do the same work
            pass
        if compile_all(_walk_of(asked), int(asked["workers"][0])):
            Loader("__main__", script).get_code("__main__")


def _walk_of(asked: dict[str, list[str]]) -> Walk:
    folders = dict(folder.split("=", 1) for folder in asked["folder"])
    walk = Walk(asked["path"], folders, asked.get("unopened", []))
    for number, root in enumerate(asked["root"]):
        walk.add(root, (), (0, number))
    return walk


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
