"""What a module imports, found in its code."""

from __future__ import annotations

from asyncllm.commands.import_walk.code_imports import imports_of, read, written


def found(source: str, package: str = "a.b.c") -> list[tuple[bool, str, tuple[str, ...]]]:
    return list(imports_of(compile(source, "made up", "exec"), package))


def test_imports_are_found_in_their_order() -> None:
    source = "import x.y\nfrom z import p, q as r\ntry:\n    from w import *\nfinally:\n    pass\n"
    assert found(source) == [
        (False, "x.y", ()),
        (False, "z", ("p", "q")),
        (False, "w", ("*",)),
    ]


def test_relative_imports() -> None:
    source = "from . import x\nfrom .y import z\nfrom .. import v\nfrom ...w import u\n"
    assert found(source) == [
        (False, "a.b.c", ("x",)),
        (False, "a.b.c.y", ("z",)),
        (False, "a.b", ("v",)),
        (False, "a.w", ("u",)),
    ]


def test_functions_come_last_and_classes_run_at_once() -> None:
    source = "def f():\n    def g():\n        import x\nclass C:\n    import y\nimport z\n"
    assert found(source) == [(False, "z", ()), (True, "x", ()), (False, "y", ())]


def test_imports_of_type_checkers_are_left_out() -> None:
    source = """
import typing
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a
else:
    import b
if typing.TYPE_CHECKING:
    import c
if not TYPE_CHECKING:
    import d
if something:
    import e
"""
    names = [name for _, name, _ in found(source)]
    assert names == ["typing", "typing", "b", "d", "e"]


def test_imports_as_a_line() -> None:
    source = "from . import x\nfrom y import *\nimport z\ndef f():\n    from w import u, v\n"
    for imports in (found(source), found(source, ""), []):
        assert read(written(imports)) == imports


def test_many_names_and_constants() -> None:
    """More than an instruction's own byte can count, as far as a jump can reach."""
    lines = [f"name_{n} = {n + 0.5}" for n in range(400)]
    checked = "\n    ".join([*lines, "import a"])
    source = "\n".join([*lines, f"if TYPE_CHECKING:\n    {checked}", "from b import c"])
    assert found(source) == [(False, "b", ("c",))]
