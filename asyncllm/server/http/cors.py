"""CORS: which other origins' pages may read what this server answers; without a flag none may.

A browser asks first (a preflight: OPTIONS with the method to come), without the API key: that is
answered before any other check. An open server still wants the key for everything else.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncllm.server.args import ServerArgs
from asyncllm.server.http.errors import ApiError, as_api_error

ANY = "*"
MAX_AGE_SECONDS = 600  # that a browser may keep the answer of a preflight
EXPOSED = "x-request-id, retry-after"


class Cors:
    def __init__(self, args: ServerArgs) -> None:
        self._origins = frozenset(args.allowed_origins or ())
        self._methods = ", ".join(args.allowed_methods).upper()
        self._headers = ", ".join(args.allowed_headers)
        self._with_credentials = args.allow_credentials

    @property
    def is_open(self) -> bool:
        return bool(self._origins)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """For `app.on_response_prepare`: streams and errors have them too."""
        origin = request.headers.get("Origin")
        if origin is None or not self._allows(origin):
            return
        headers = response.headers
        headers["Access-Control-Expose-Headers"] = EXPOSED
        if self._with_credentials:  # a browser then takes no *
            headers["Access-Control-Allow-Credentials"] = "true"
        if ANY in self._origins and not self._with_credentials:
            headers["Access-Control-Allow-Origin"] = ANY
        else:
            headers["Access-Control-Allow-Origin"] = origin
            headers.add("Vary", "Origin")

    def preflights(self) -> Middleware:
        """The middleware that answers them."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            method = request.headers.get("Access-Control-Request-Method")
            if request.method != "OPTIONS" or method is None:
                return await handler(request)
            if not self._allows(request.headers.get("Origin", "")):
                return as_api_error(ApiError(403, "this origin is not allowed")).response()
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            return web.Response(
                status=204,
                headers={
                    "Access-Control-Allow-Methods": method
                    if self._methods == ANY
                    else self._methods,
                    "Access-Control-Allow-Headers": wanted
                    if self._headers == ANY
                    else self._headers,
                    "Access-Control-Max-Age": str(MAX_AGE_SECONDS),
                },
            )

        return answer

    def _allows(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins
