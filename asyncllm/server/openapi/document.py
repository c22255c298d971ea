"""GET /openapi.json: the routes and their types as an OpenAPI 3.1 document.

Schemas come from the msgspec types that requests are decoded into and responses are documented
with; what a type cannot express (ranges, meanings, what a field typed `Any` takes) comes from
fields.py. The document names no model and no user, so it needs no key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import msgspec
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from asyncllm.sampling_params import SamplingParams
from asyncllm.server.args import ServerArgs
from asyncllm.server.openapi.fields import FIELD_DOCS, field_doc
from asyncllm.server.openapi.response_types import ErrorBody

_REF = "#/components/schemas/{name}"
_SECURITY_SCHEME = "key"
_ABOUT = (
    "An LLM served by asyncllm, under the names of OpenAI's, Anthropic's and vLLM's APIs. Unknown "
    "fields of a request are ignored; null is the same as leaving a field out."
)

_MEANINGS = {
    400: "The request cannot be served as it is; param names the field to blame.",
    401: "No valid API key.",
    403: "The host, the origin or the path that the request names is not allowed here.",
    404: "There is no such model, or nothing of that name.",
    408: "The body took too long to come.",
    413: "The body is over --max-body-bytes.",
    429: "Too many wait already; Retry-After says when to try again.",
    500: "A failure of the server, which the same request would meet again.",
    503: "Loading, shutting down, or it waited too long for its turn.",
}


class Document:
    """Made at the first request, in a thread: it takes tens of milliseconds."""

    def __init__(
        self, routes: Iterable[Route], needs_key: bool, root_path: str | None = None
    ) -> None:
        self._routes = tuple(routes)
        self._needs_key = needs_key
        self._root_path = root_path
        self._body: bytes | None = None

    async def body(self) -> bytes:
        if self._body is None:
            self._body = await asyncio.to_thread(self._make)
        return self._body

    def _make(self) -> bytes:
        return orjson.dumps(openapi(self._routes, self._needs_key, self._root_path))


DOCUMENT = web.AppKey("document", Document)


async def show_document(http: web.Request) -> web.Response:
    return web.Response(body=await http.app[DOCUMENT].body(), content_type="application/json")


def openapi(
    routes: Iterable[Route], needs_key: bool, root_path: str | None = None
) -> dict[str, Any]:
    """`needs_key`: whether routes that are not public need an API key."""
    routes = tuple(routes)
    schemas = _Schemas(routes)
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(
            route, path, schemas, needs_key and not route.is_public
        )
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "asyncllm", "version": version("asyncllm"), "description": _ABOUT},
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {"schemas": schemas.components},
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if needs_key:
        scheme = {"type": "http", "scheme": "bearer", "description": "one of --api-key"}
        document["components"]["securitySchemes"] = {_SECURITY_SCHEME: scheme}
    return document


class _Schemas:
    """The shared components, and references into them."""

    def __init__(self, routes: Iterable[Route]) -> None:
        types = [
            kind
            for route in routes
            for kind in (route.request, route.answer, route.event, route.error)
            if kind is not None
        ]
        types = list(dict.fromkeys([*types, *SHAPES]))
        schemas, self.components = msgspec.json.schema_components(types, ref_template=_REF)
        self._of = dict(zip(types, schemas, strict=True))
        requests = {route.request for route in routes if route.request is not None}
        describe_fields(requests, self.components, self.of)

    def of(self, kind: Any) -> dict[str, Any]:
        return self._of[kind]


def _operation(route: Route, path: str, schemas: _Schemas, needs_key: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub('[^a-zA-Z0-9]+', '_', path).rstrip('_')}",
        "tags": [route.tag],
        "summary": route.summary,
        "responses": {"200": _answer(route, schemas)},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        body: dict[str, Any] = {"schema": schemas.of(route.request)}
        if route.example is not None:
            body["example"] = route.example
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if needs_key:
        operation["security"] = [{_SECURITY_SCHEME: []}]
    for status in sorted({403, *route.errors, *([401] if needs_key else [])}):
        operation["responses"][str(status)] = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": schemas.of(route.error)}},
        }
    return operation


def _answer(route: Route, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": schemas.of(route.answer)}
    elif route.media_type is not None:
        content[route.media_type] = {"schema": {"type": "string"}}
    if route.event is not None:
        content["text/event-stream"] = {"schema": _event(schemas.of(route.event), schemas, route)}
    answer: dict[str, Any] = {"description": "OK"}
    if content:
        answer["content"] = content
    return answer


def _event(chunk: dict[str, Any], schemas: _Schemas, route: Route) -> dict[str, Any]:
    """The schema of one event: a chunk, an error that ends the stream, or [DONE]."""
    of_json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [chunk, schemas.of(route.error)]},
    }
    data = {"anyOf": [{"const": "[DONE]"}, of_json]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


READS = (500, 503)
TAKES_A_BODY = (400, 408, 413)
GENERATES = (*TAKES_A_BODY, 404, 429, *READS)


def always(args: ServerArgs) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Route:
    """One row of routes.py. `errors` are statuses; 401 is added where the route needs the key."""

    method: str
    path: str  # aiohttp's pattern
    handler: Handler
    tag: str
    summary: str
    request: type[msgspec.Struct] | None = None
    example: dict[str, Any] | None = None  # a valid request body
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # name -> its JSON Schema
    answer: Any = None  # the type of the JSON body; None: the body is `media_type`, or empty
    media_type: str | None = "application/json"  # None: an empty body
    event: Any = None  # the type of a stream's events, where `stream` is a field of the request
    errors: tuple[int, ...] = READS
    error: Any = ErrorBody
    is_public: bool = False  # needs no key
    is_served: Callable[[ServerArgs], bool] = always


_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(SamplingParams)
    if isinstance(field.default, bool | int | float)
}


SHAPES = tuple(doc.type for doc in FIELD_DOCS.values() if doc.type is not None)  # hashable, all


def describe_fields(
    requests: Iterable[type], components: dict[str, Any], schema_of: Callable[[Any], dict[str, Any]]
) -> None:
    """Put notes, ranges, defaults and the shapes of `Any` into the components of these types.

    `schema_of` one of `SHAPES`: a reference into the components, or what holds one.
    """
    for kind in with_parts(requests):
        properties = components[kind.__name__]["properties"]
        for name in kind.__struct_fields__:
            if (doc := field_doc(kind, name)) is None:
                continue
            if doc.type is not None:
                properties[name] = dict(schema_of(doc.type))
            if name in _DEFAULTS and doc.kind == "done":
                properties[name]["default"] = _DEFAULTS[name]
            properties[name] |= {
                **doc.schema,
                "description": doc.description,
                "x-kind": doc.kind,
            }


def with_parts(requests: Iterable[type]) -> list[Any]:
    """The request types and the Structs within them."""
    names: dict[str, Any] = {}
    for part in msgspec.inspect.multi_type_info(list(requests)):
        _collect(part, names)
    return list(names.values())


def _collect(part: Any, names: dict[str, Any]) -> None:
    if isinstance(part, msgspec.inspect.StructType):
        if part.cls.__name__ in names:
            return
        names[part.cls.__name__] = part.cls
        for field in part.fields:
            _collect(field.type, names)
    elif isinstance(part, msgspec.inspect.UnionType):
        for one in part.types:
            _collect(one, names)
    elif isinstance(part, msgspec.inspect.ListType):
        _collect(part.item_type, names)
