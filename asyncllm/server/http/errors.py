"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, always all four.

`ApiError` is the server's own; `as_api_error` translates every other exception, so the middleware
and a stream that has already begun report the same failure in the same text. An unexpected
exception is logged with its traceback; the client gets nothing but "internal error". HTTP that the
parser itself cannot read never reaches a middleware: connection.py responds to that one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

import orjson
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from asyncllm.errors import (
    EngineDeadError,
    EngineNotStartedError,
    InvalidRequestError,
    QueueFullError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
MAX_MESSAGE_CHARS = 2000  # messages quote what the client sent

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An error with everything its response needs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> None:
        """`close` ends the connection: its body was not read to the end."""
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = headers or {}
        self.close = close

    def body(self) -> bytes:
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": _error_type(self.status),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def response(self, body: bytes | None = None) -> web.Response:
        """`body`: the same error in the shape of another API."""
        response = web.Response(
            status=self.status,
            body=self.body() if body is None else body,
            content_type="application/json",
            headers=self.headers,
        )
        if self.close:
            response.force_close()
        return response


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def as_api_error(error: BaseException) -> ApiError:
    """The client's view of any exception; logs unexpected ones."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return bad_request(str(error), error.param, error.code)
    if isinstance(error, QueueFullError):
        return _retry(429, str(error))
    if isinstance(error, EngineNotStartedError):
        return _retry(503, "the model is still loading")
    if isinstance(error, EngineDeadError):
        # Its reason is for the operator, who finds it in the log and at /health.
        return ApiError(503, "the engine is not running")
    if isinstance(error, web.HTTPException):
        return _from_http_exception(error)
    if isinstance(error, ConnectionError):
        return bad_request("the connection was lost")  # there is no reader
    logger.error("unexpected error while serving a request", exc_info=error)
    return internal_error("internal error")


def internal_error(message: str) -> ApiError:
    # The same request would fail again: tell clients that retry by themselves not to.
    return ApiError(500, message, headers={"x-should-retry": "false"})


def overloaded() -> ApiError:
    """For a request that was taken, and waited too long."""
    return _retry(503, "the request waited too long for its turn")


def _retry(status: int, message: str) -> ApiError:
    return ApiError(status, message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def _from_http_exception(error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals: wrong method, body too large."""
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return ApiError(error.status, _HTTP_MESSAGES.get(error.status, error.reason), headers=headers)


_HTTP_MESSAGES = {
    405: "the route does not take this method",
    413: "the request body is too large",
}


def _error_type(status: int) -> str:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


HTTP_VERSIONS = (HttpVersion11, HttpVersion10)

# Checks a request whose route is known and whose body is not read: raises `ApiError` to refuse it.
Check = Callable[[web.Request], None]


def error_middleware(
    checks: Sequence[Check], renderers: Mapping[str, Callable[[Exception], web.Response]]
) -> Middleware:
    """Turn what `checks` or a handler raise into a four-key body, or into its API's own shape.

    renderers: the beginning of a path to the renderer of errors there.
    """

    @web.middleware
    async def render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.version not in HTTP_VERSIONS:  # the parser takes any digits
                raise ApiError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here", close=True)
            for check in checks:
                check(request)
            return await handler(request)
        except Exception as error:
            response = error_response(request, error)
            if request.writer.output_size:
                raise  # a stream has begun, which cannot turn into this: aiohttp cuts it off
            return response

    # A function of its own: a variable that outlives the `except` block would tie the error to its
    # frames, and to the request's body, until the garbage collector runs.
    def error_response(request: web.Request, error: Exception) -> web.Response:
        if isinstance(error, web.HTTPException):
            error.with_traceback(None)  # the request holds those of its router
        own = (
            renderer for prefix, renderer in renderers.items() if request.path.startswith(prefix)
        )
        known = _no_route(request) if isinstance(error, web.HTTPNotFound) else error
        return next(own, _four_keys)(known)

    return render_errors


def _no_route(request: web.Request) -> ApiError:
    """Show the whole path: clients join it from a base URL and their own part."""
    return ApiError(404, f"there is no such route: {request.method} {request.rel_url.raw_path}")


def _four_keys(error: Exception) -> web.Response:
    return as_api_error(error).response()
