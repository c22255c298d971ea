"""Whether a chat template wants a message's content as a string or as OpenAI's list of parts.

Templates that can take parts go through them in a loop; the others print what they are given, and
would print a list as Python writes it. This looks for such a loop, as vLLM's `auto` does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from jinja2 import Environment, TemplateError, nodes

CONTENT = "content"


@lru_cache(maxsize=8)  # the server's own, and those that requests bring
def detect_content_format(template: str) -> Literal["string", "openai"]:
    """ "string" for a template that cannot be read, too: rendering will say what is wrong."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return "string"
    names = _names_of_content(tree)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    return "openai" if loops else "string"


def _names_of_content(tree: nodes.Template) -> set[str]:
    """`content` itself, and variables that are set to a message's."""
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
