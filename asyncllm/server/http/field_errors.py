"""A field of a body has the wrong type: msgspec's word on it, in the words of those who write JSON.

msgspec says "Expected `float | null`, got `str` - at `$.temperature`". What it does not say, the
value, is not looked for: the body may be large.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from asyncllm.server.http.errors import ApiError, bad_request

_PATH = re.compile(r" - at `\$\.(([A-Za-z0-9_]+)[^`]*)`$")
# A field that is null is one left out.
_MISSING = re.compile(r"(?:required field `|got `null` - at `\$\.)([A-Za-z0-9_]+)`$")
_EXPECTED = re.compile(r"Expected `([a-z |]+)`([^,]*)(?:, got `([a-z]+)`)?$")
_NO_VALUE = re.compile("Invalid enum value (.*)", re.DOTALL)
_KINDS = {
    "int": "an integer", "float": "a number", "bool": "a boolean", "str": "a string",
    "array": "an array", "object": "an object",
}  # fmt: skip


def field_error(message: str, wanted: Any) -> ApiError:
    """`message`: of msgspec, of a body that is no `wanted`; the root field is `param`."""
    if found := _MISSING.search(message):
        return bad_request(f"`{found[1]}` is required", found[1])
    found = _PATH.search(message)
    if found is None:
        return bad_request(f"the request body {_in_words(message)}")
    path, name = found.groups()
    problem = message[: found.start()]
    if no_value := _NO_VALUE.fullmatch(problem):
        choices = ", ".join(_choices(wanted, path)) or "its values"
        return bad_request(f"{path} must be one of {choices}, got {no_value[1]}", name)
    return bad_request(f"{path} {_in_words(problem)}", name)


@lru_cache
def _choices(wanted: Any, name: str) -> tuple[str, ...]:
    """The values that a field may have, where they are few."""
    hint = get_type_hints(wanted).get(name)
    arms = [arm for arm in (hint, *get_args(hint)) if get_origin(arm) is Literal]
    return tuple(str(value) for arm in arms for value in get_args(arm))


def _in_words(problem: str) -> str:
    """How the sentence goes on; what is not known is told as it is."""
    found = _EXPECTED.fullmatch(problem)
    if found is None:
        return f"is not what this route takes: {problem}"
    wanted = [_KINDS.get(kind, kind) for kind in found[1].split(" | ") if kind != "null"]
    got = "a fraction" if found[3] == "float" else _KINDS.get(found[3], found[3])
    return f"must be {' or '.join(wanted)}{found[2]}" + (f", got {got}" if got else "")
