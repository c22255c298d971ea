"""The routes that only report: models, health, load, version, metrics."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from asyncllm.server.http.bodies import json_response
from asyncllm.server.http.errors import ApiError
from asyncllm.server.observability.metrics import METRICS
from asyncllm.server.service import SERVICE, Service

VERSION = version("asyncllm")
LATE_SECONDS = 2.0  # of a rank: /health names it
_STARTED = int(time.time())


async def list_models(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    adapters = await service.engine.list_loras()
    names = [*service.model_names, *(adapter.lora_name for adapter in adapters)]
    cards = [_model_card(service, name) for name in names]
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"object": "list", "data": cards, **ends})


async def show_model(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    name = http.match_info["model"]
    service.check_model(name)
    return json_response(_model_card(service, name))


async def health(http: web.Request) -> web.Response:
    """200, or 503 with the reason. The body is empty where all is well, else it names engines that
    do not serve, of several, and ranks for which others wait."""
    service = http.app[SERVICE]
    reason = "the server is shutting down" if service.draining else service.engine.health()
    if reason is not None:
        raise ApiError(503, reason)
    lines = []
    for place, replica in enumerate(service.engine.replicas):
        lines += [f"engine {place}: {why}"] if (why := replica.health()) else []
        lines += [
            f"engine {place}: rank {each.rank} is {each.lag_seconds:.1f} s late"
            for each in replica.ranks()
            if each.lag_seconds > LATE_SECONDS
        ]
    return web.Response(text="\n".join(lines))


async def show_load(http: web.Request) -> web.Response:
    return json_response({"server_load": http.app[SERVICE].num_live})


async def show_version(http: web.Request) -> web.Response:
    return json_response({"version": VERSION})


async def metrics(http: web.Request) -> web.Response:
    body = http.app[METRICS].exposition()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _model_card(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's fields, vLLM's, and the three that Anthropic's clients read."""
    adapter = service.check_model(name)
    base, config = service.model_names[0], service.engine.config
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "asyncllm",
        "root": config.model_name if adapter is None else str(adapter.lora_path),
        "parent": None if adapter is None else base,
        "max_model_len": service.engine.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(_STARTED, UTC).isoformat(),
    }
