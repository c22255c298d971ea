"""Detects whether a chat template takes a message's content as a string or as a list of parts.

A template for parts iterates over them; another would print the list in Python's notation. As in
vLLM's `auto`, the template is searched for such a loop.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from jinja2 import Environment, TemplateError, nodes

CONTENT = "content"


@lru_cache(maxsize=8)  # the server's template, and those of requests
def detect_content_format(template: str) -> Literal["string", "openai"]:
    """Returns "string" also for a template with syntax errors; rendering will report them."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return "string"
    names = _names_of_content(tree)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    return "openai" if loops else "string"


def _names_of_content(tree: nodes.Template) -> set[str]:
    """`content`, and variables that are set to the content of a message."""
    names = {CONTENT}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return names


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == CONTENT
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == CONTENT
    return False
