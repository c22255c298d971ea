"""What the APIs that become a chat request share: refusing fields, errors in the client's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import msgspec

from asyncllm.errors import InvalidRequestError
from asyncllm.server.errors import ApiError, bad_request

# field -> whether a value asks for nothing (None always does)
Refusals = Mapping[str, Callable[[Any], bool]]

_ROOT = re.compile(r"\w+")


def asks_nothing(value: Any) -> bool:
    """Of a field where only what is empty does."""
    return not value


def sent(request: msgspec.Struct) -> dict[str, Any]:
    """The fields that the client sent, but for nulls: a few of many."""
    values = zip(request.__struct_fields__, msgspec.structs.astuple(request), strict=True)
    return {name: value for name, value in values if value is not None}


def refuse(given: Mapping[str, Any], table: Refusals) -> None:
    """Raises `ApiError` 400 for the first field that asks for what is not there.

    given: what was `sent`.
    """
    for name, value in given.items():
        if (harmless := table.get(name)) is not None and not harmless(value):
            raise bad_request(f"{name} is not supported with this value", name)


def renamed(error: InvalidRequestError, name: str | None) -> InvalidRequestError:
    """The error with `name` for its field, in its message too.

    A copy: requests that wait for the same grammar are all raised one error.
    """
    told = copy(error)
    if error.param is not None and name is not None:
        told.args = (str(error).replace(error.param, name),)
    told.param = name
    return told


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of the chat request name the field that the client sent instead."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        root = _ROOT.match(error.param or "")
        if root is not None and root.group() in names:
            error.param = names[root.group()]
            if isinstance(error, InvalidRequestError) and str(error).startswith(root.group()):
                error.args = (error.param + str(error)[root.end() :],)
        raise
