"""The pages at `/` (a chat and a dashboard) and `/docs`, served as the files they are in `web/`.

The files hold nothing of the model or its users, so they need no API key; what they ask for
(`/v1/...`, `/dashboard/events`) does. Nothing is fetched from anywhere else, and the policy below
holds the browser to that: no foreign request, no inline script, no HTML made from text.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

WEB = Path(__file__).parent / "web"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What may be asked for. A name is looked up here and never joined to a path.
_FILES = {file.name: file for file in WEB.iterdir() if file.suffix in _TYPES}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again each time, and answered 304 while unchanged
}


async def page_file(http: web.Request) -> web.StreamResponse:
    """GET / and GET /web/{name}."""
    return _answer(http.match_info.get("name", "index.html"))


async def docs_page(http: web.Request) -> web.StreamResponse:
    """GET /docs."""
    return _answer("docs.html")


def _answer(name: str) -> web.StreamResponse:
    file = _FILES.get(name)
    if file is None:
        raise web.HTTPNotFound
    return web.FileResponse(file, headers={**_HEADERS, "Content-Type": _TYPES[file.suffix]})
