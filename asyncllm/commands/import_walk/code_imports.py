"""What a module imports, as its code says: nothing of it is run.

Imports of functions are told from those of the module, and imports for type checkers alone are left
out. As a line of text they go from a worker to the walk.
"""

from __future__ import annotations

import sys
from opcode import opmap

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest of this package
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType

    Import = tuple[bool, str, tuple[str, ...]]  # in a function, of which module, what is taken

IN_FUNCTION = 0x1  # CO_OPTIMIZED of a code's flags; the body of a class runs at once
ATTRIBUTE_SHIFT = 1 if sys.version_info >= (3, 12) else 0  # the lowest bit: a method to call
JUMPS = {"POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE"}  # 3.12's name, 3.11's
OF_INTEREST = {"LOAD_CONST", "LOAD_NAME", "LOAD_ATTR", "IMPORT_NAME", *JUMPS}
NAMES = {op: name for name, op in opmap.items() if name in OF_INTEREST}


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


def written(imports: Iterable[Import]) -> str:
    """A line, which `read` reads."""
    words = (f"{int(flag)} {' '.join((name, *taken))};" for flag, name, taken in imports)
    return "".join(words) + "\n"


def read(line: str) -> list[Import]:
    parts = [text.split(" ") for text in line.split(";")[:-1]]
    return [(flag == "1", name, tuple(taken)) for flag, name, *taken in parts]
