"""Errors as Anthropic's clients read them: {"type": "error", "error": {...}, "request_id"}.

An answer of these routes, an error too, has its id in the header `request-id`. What a middleware
refuses (no key, no such route) is refused in the same shape, so the shape hangs on the path.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import orjson
from aiohttp import web

from asyncllm.server.errors import ApiError, as_api_error

PREFIX = "/v1/messages"

REQUEST_ID_HEADER = "request-id"
# The client's tool runner asks for a conversation held here, and by this code knows to go without.
THREAD_UNSUPPORTED = "thread_unsupported_request"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def error_body(error: ApiError, name: str) -> bytes:
    """There is no `param` here, so the message begins with it."""
    message = error.message
    if error.param is not None and re.match(rf"`?{re.escape(error.param)}\b", message) is None:
        message = f"{error.param}: {message}"
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    detail: dict[str, Any] = {"type": kind, "message": message}
    if error.code == THREAD_UNSUPPORTED:
        detail["details"] = {"error_code": THREAD_UNSUPPORTED}
    return orjson.dumps({"type": "error", "error": detail, "request_id": name})


def error_response(error: Exception) -> web.Response:
    known, name = as_api_error(error), new_request_id()
    known.headers[REQUEST_ID_HEADER] = name
    return known.response(error_body(known, name))
