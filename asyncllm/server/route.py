"""What one route is: where it is, who answers, and what its document says.

The table of all of them is routes.py; app.py serves from it and openapi.py describes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp.typedefs import Handler

from asyncllm.server.answers import ErrorBody
from asyncllm.server.args import ServerArgs

READS = (500, 503)
TAKES_A_BODY = (400, 408, 413, 415)
GENERATES = (*TAKES_A_BODY, 404, 429, *READS)


def always(args: ServerArgs) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Route:
    """`errors` are statuses; 401 is added where the route needs the key."""

    method: str
    path: str  # aiohttp's pattern
    handler: Handler
    tag: str
    summary: str
    request: type[msgspec.Struct] | None = None
    example: dict[str, Any] | None = None  # a request body that is answered
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # name -> its JSON Schema
    answer: Any = None  # the type of the JSON body; None: the body is `media_type`, or empty
    media_type: str | None = "application/json"  # None: an empty body
    event: Any = None  # the type of a stream's events, where `stream` is a field of the request
    errors: tuple[int, ...] = READS
    error: Any = ErrorBody
    is_public: bool = False  # asks for no key
    is_served: Callable[[ServerArgs], bool] = always
