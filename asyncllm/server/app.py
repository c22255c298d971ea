"""The aiohttp application: its middlewares and routes. Run it with `handler_cancellation=True`."""

from __future__ import annotations

import importlib
import re
import uuid
from collections.abc import Iterator

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.host import in_own_thread
from asyncllm.server.args import ServerArgs
from asyncllm.server.completions import PARAMS_CACHE, ParamsCache
from asyncllm.server.http.access import (
    are_hosts_checked,
    host_check,
    key_check,
)
from asyncllm.server.http.bodies import OFF_LOOP, OffLoop
from asyncllm.server.http.connection import connection_middleware
from asyncllm.server.http.cors import Cors
from asyncllm.server.http.errors import Check, error_middleware
from asyncllm.server.messages import message as anthropic
from asyncllm.server.observability.metrics import METRICS, Metrics
from asyncllm.server.openapi.document import DOCUMENT, Document
from asyncllm.server.page import DASHBOARD, Dashboard
from asyncllm.server.responses.background import Background
from asyncllm.server.responses.serving import BACKGROUND, RESPONSES
from asyncllm.server.responses.store import ResponseStore
from asyncllm.server.routes import served_routes
from asyncllm.server.service import SERVICE, Service

_ROUTE_BY = {"GET": web.get, "POST": web.post, "DELETE": web.delete}  # GET takes HEAD too
LOAD_FORMAT = "endpoint-load-metrics-format"
REQUEST_ID = re.compile("[A-Za-z0-9._-]{1,128}")


def build_app(engine: AsyncLLMEngine, args: ServerArgs) -> web.Application:
    """The application for `engine`, which need not be started yet."""
    routes = list(served_routes(args))
    prefixes = ["", *([args.root_path] if args.root_path else ())]
    public = frozenset(
        prefix + route.path for prefix in prefixes for route in routes if route.is_public
    )
    renderers = dict.fromkeys(
        (prefix + anthropic.PREFIX for prefix in prefixes), anthropic.error_response
    )
    app = web.Application(
        middlewares=[
            connection_middleware,
            error_middleware([*_checks(args, public)], renderers),
            *(_import_middleware(name) for name in args.middleware or ()),
        ],
        client_max_size=args.max_body_bytes,
    )
    app.on_response_prepare.append(_name_server)
    add_id = _always_add_request_id if args.enable_request_id_headers else _echo_request_id
    app.on_response_prepare.append(add_id)
    cors = Cors(args)
    if cors.is_open:
        app.middlewares.insert(1, cors.preflights())
        app.on_response_prepare.append(cors.add_headers)
    service = Service(engine, args)
    app[SERVICE] = service
    app[OFF_LOOP] = OffLoop()
    app[PARAMS_CACHE] = ParamsCache()
    app.on_cleanup.append(app[OFF_LOOP].close)
    app[RESPONSES] = ResponseStore(args.responses_store_bytes)
    app[BACKGROUND] = Background(args.responses_store_bytes)
    app.on_shutdown.append(app[BACKGROUND].close)
    if args.otlp_traces_endpoint is not None:
        _add_tracing(app, service, args.otlp_traces_endpoint)
    app[METRICS] = Metrics(engine, service.model_names[0], args.metrics_prefix)
    app.on_response_prepare.append(app[METRICS].count_response)
    app[DOCUMENT] = Document(routes, bool(args.keys()), args.root_path)
    for prefix in prefixes:
        app.add_routes(
            _ROUTE_BY[route.method](prefix + route.path, route.handler) for route in routes
        )
    if not args.disable_page:
        app[DASHBOARD] = Dashboard(engine)
        app.on_shutdown.append(app[DASHBOARD].close)
    return app


def _checks(args: ServerArgs, public: frozenset[str]) -> Iterator[Check]:
    """The checks that the flags enable."""
    if are_hosts_checked(args):
        yield host_check(args)
    if args.keys():
        yield key_check(args.keys(), public)


def _add_tracing(app: web.Application, service: Service, endpoint: str) -> None:
    # OpenTelemetry is optional: imported only if the flag is used.
    from asyncllm.server.observability.tracing import (
        Tracing,
        make_exporter,
        trace_context_middleware,
    )

    tracing = Tracing(make_exporter(endpoint))
    service.tracing = tracing
    service.engine.stat_loggers.append(tracing)
    app.middlewares.append(trace_context_middleware)

    async def close(_: web.Application) -> None:
        await in_own_thread(tracing.close)

    app.on_cleanup.append(close)


def _import_middleware(name: str) -> Middleware:
    """Import `module:name`, or `module.name` as vLLM has it: a function, or a class to instantiate.

    Raises `ValueError` naming the flag.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
        made = found() if isinstance(found, type) else found
    except Exception as error:  # the module may raise anything
        raise ValueError(f"middleware {name}: {error!r}") from error
    if not callable(made):
        raise ValueError(f"middleware {name}: is not callable")
    return web.middleware(made)


def _report_load(request: web.Request, response: web.StreamResponse) -> None:
    """Add the ORCA load report that a load balancer asks for, as vLLM does."""
    wanted = request.headers[LOAD_FORMAT].lower()
    service = request.app[SERVICE]
    if wanted not in ("text", "json") or service.engine.health() is not None:
        return
    stats = service.engine.stats()
    load = {
        "kv_cache_usage_perc": stats.kv_cache_usage,
        "num_requests_waiting": float(stats.num_waiting + stats.num_swapped),
    }
    if wanted == "json":
        report = f"JSON {orjson.dumps({'named_metrics': load}).decode()}"
    else:
        report = "TEXT " + ", ".join(f"named_metrics.{k}={v}" for k, v in load.items())
    response.headers["endpoint-load-metrics"] = report


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    """Replace aiohttp's header, which discloses the versions of Python and aiohttp."""
    response.headers["Server"] = "asyncllm"
    if LOAD_FORMAT in request.headers:
        _report_load(request, response)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Return the client's request id, for its logs; the engine does not use it."""
    request_id = request.headers.get("X-Request-Id")
    if request_id is not None and REQUEST_ID.fullmatch(request_id):
        response.headers["X-Request-Id"] = request_id


async def _always_add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    await _echo_request_id(request, response)
    response.headers.setdefault("X-Request-Id", uuid.uuid4().hex)
