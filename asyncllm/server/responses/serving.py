"""/v1/responses: create, get, cancel and delete a response, list its input items."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from asyncllm.engine.text.prompt import TextPrompt
from asyncllm.server.chat.serving import (
    message_call,
    num_tokens,
    render_prompt,
)
from asyncllm.server.http.access import given_keys
from asyncllm.server.http.bodies import OFF_LOOP, json_response, prepare, read_body, render_response
from asyncllm.server.http.errors import ApiError, bad_request
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.call import Call
from asyncllm.server.inputs.refusals import rename_params
from asyncllm.server.outputs.consumers import ParsedOutput
from asyncllm.server.outputs.generation import Consumer
from asyncllm.server.outputs.parts import PartsCollector
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.responses.background import Background
from asyncllm.server.responses.chat_request import (
    FIELD_NAMES,
    chat_request,
    drop_oldest_turns,
    prompt_request,
)
from asyncllm.server.responses.items import Item, read_items
from asyncllm.server.responses.protocol import ResponsesRequest
from asyncllm.server.responses.store import (
    LostTurnError,
    References,
    ResponseStore,
    StoredResponse,
    names_kept_items,
)
from asyncllm.server.responses.stream import ResponseStream
from asyncllm.server.responses.view import ResponseView
from asyncllm.server.service import SERVICE

RESPONSES = web.AppKey("responses", ResponseStore)
BACKGROUND = web.AppKey("background", Background)

MAX_LISTED, DEFAULT_LISTED = 100, 20
MAX_DIGITS = 18  # of an event's number


async def create_response(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, ResponsesRequest)
    unique = uuid.uuid4().hex
    is_large = names_kept_items(request)
    items, chat = await prepare(http, partial(_read, http, request, unique), is_large)
    with rename_params(FIELD_NAMES):
        if request.truncation == "auto":
            await drop_oldest_turns(chat, service, http.app[OFF_LOOP])
        make_call = partial(message_call, chat, service, f"resp_{unique}", FIELD_NAMES)
        call = await prepare(http, make_call, is_large)
        view = ResponseView(request, call, service.token_names(request))
        if request.background:
            return await _in_background(http, request, items, call, view)
        keep = partial(_keep, http, request, items)
        if request.stream:
            sse = SSEStream(http, service.frames)
            sink = ResponseStream(sse, view, keep)
            return await service.stream(sse, call, partial(ParsedOutput, call, sink))
        parts = PartsCollector()
        await service.collect(call, partial(ParsedOutput, call, parts))
    return await render_response(http, partial(_whole, view, parts, keep), call.has_logprobs)


async def _in_background(
    http: web.Request,
    request: ResponsesRequest,
    items: bytes,
    call: Call,
    view: ResponseView,
) -> web.StreamResponse:
    """Queue it, so that what is wrong with it is said here; the rest goes on by itself."""
    service, store, background = http.app[SERVICE], http.app[RESPONSES], http.app[BACKGROUND]
    owner = _owner(http)
    if request.store is False:
        raise bad_request("background can only be used when `store` is true", "background")
    first = orjson.dumps(view.body("in_progress", []))
    kept = StoredResponse(owner, first, items, request.previous_response_id, is_running=True)
    store.put(call.id, kept)
    if store.get(call.id, owner) is None:
        raise bad_request("--responses-store-bytes has no room for a response", "background")
    log = background.new_log(call.id) if request.stream else None

    def keep(body: dict[str, Any]) -> None:
        store.end(call.id, orjson.dumps(body))

    sink = PartsCollector() if log is None else ResponseStream(log, view, keep)
    make_consumer: Callable[[], Consumer] = partial(ParsedOutput, call, sink)
    if log is not None and service.args.stream_interval > 1:
        make_consumer = service.paced(call, make_consumer)
    try:
        wait = await service.collect_later(call, make_consumer)
    except BaseException:
        background.forget(call.id)
        store.delete(call.id, owner)
        raise

    async def finish() -> None:
        try:
            await wait()
        except ApiError as error:
            keep(view.failed(error, view.cut_off(sink.parts)))
        except asyncio.CancelledError:
            keep(view.body("cancelled", view.cut_off(sink.parts)))
            if log is not None:
                log.end(b"")
            raise
        else:
            if isinstance(sink, PartsCollector):  # a stream has kept its own
                keep(view.whole(sink))

    background.start(call.id, finish)
    if log is not None:
        return await log.follow(http, service.frames, 0)
    return json_response(view.body("queued", []))


async def count_input_tokens(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    request = await read_body(http, ResponsesRequest)

    def read() -> TextPrompt:
        items = read_items(request.input, "", _references(http).find)
        chat = prompt_request(request, _items_before(http, request) + items)
        with rename_params(FIELD_NAMES):
            return render_prompt(chat, service)

    prompt = await prepare(http, read, names_kept_items(request))
    count = await num_tokens(prompt, service)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def show_response(http: web.Request) -> web.StreamResponse:
    """With `stream` the events of one that was streamed in the background, from the one after
    `starting_after` on."""
    response = _stored(http)
    if http.query.get("stream") != "true":
        return web.Response(body=response.body, content_type="application/json")
    log = http.app[BACKGROUND].log_of(http.match_info["response_id"])
    if log is None:
        what = "only a response that was streamed in the background has events, while they are kept"
        raise bad_request(what, "stream")
    after = http.query.get("starting_after", "-1")
    if not after.removeprefix("-").isascii() or not after.removeprefix("-").isdigit():
        raise bad_request("starting_after must be the number of an event", "starting_after")
    return await log.follow(http, http.app[SERVICE].frames, max(int(after[:MAX_DIGITS]) + 1, 0))


async def delete_response(http: web.Request) -> web.Response:
    _stored(http)
    name = http.match_info["response_id"]
    await http.app[BACKGROUND].cancel(name)
    http.app[BACKGROUND].forget(name)
    http.app[RESPONSES].delete(name, _owner(http))
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(http: web.Request) -> web.Response:
    """One that has ended stays as it is."""
    response = _stored(http)
    if not orjson.loads(response.body)["background"]:
        raise bad_request("Cannot cancel a synchronous response.", "response_id")
    await http.app[BACKGROUND].cancel(http.match_info["response_id"])
    return web.Response(body=response.body, content_type="application/json")


async def list_input_items(http: web.Request) -> web.Response:
    """`order` desc (the default) or asc, `after` an item's id, `limit` of them."""
    items = orjson.loads(_stored(http).input_items)
    if http.query.get("order", "desc") == "desc":
        items.reverse()
    after = http.query.get("after")
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_request("after names no item of this response", "after")
        items = items[places[0] + 1 :]
    limit = _limit(http.query.get("limit"))
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LISTED
    if given not in map(str, range(1, MAX_LISTED + 1)):
        raise bad_request(f"limit must be between 1 and {MAX_LISTED}", "limit")
    return int(given)


def _items_before(http: web.Request, request: ResponsesRequest) -> list[Item]:
    """The items of the conversation that the request continues. Raises `ApiError`."""
    name = request.previous_response_id
    if name is None:
        return []
    try:
        turns = http.app[RESPONSES].conversation(name, _owner(http))
    except LostTurnError as error:
        raise bad_request(
            f"the previous response {str(error)[:100]!r} is not kept here, or not any more",
            "previous_response_id",
            "previous_response_not_found",
        ) from None
    if any(turn.is_running for turn in turns):
        raise bad_request("a previous response has not ended yet", "previous_response_id")
    if sum(turn.num_bytes for turn in turns) > http.client_max_size:
        limit = f"the limit of {http.client_max_size} bytes"
        raise bad_request(f"the conversation is over {limit}", "previous_response_id")
    return [item for turn in turns for item in turn.items()]


def _read(http: web.Request, request: ResponsesRequest, unique: str) -> tuple[bytes, ChatRequest]:
    """The request's own items as JSON, and the chat with those before them. Raises `ApiError`."""
    items = read_items(request.input, unique, _references(http).find)
    return orjson.dumps(items), chat_request(request, _items_before(http, request) + items)


def _whole(
    view: ResponseView, answer: PartsCollector, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    body = view.whole(answer)
    keep(body)
    return body


def _keep(http: web.Request, request: ResponsesRequest, items: bytes, body: dict[str, Any]) -> None:
    if request.store is not False:
        previous = request.previous_response_id
        kept = StoredResponse(_owner(http), orjson.dumps(body), items, previous)
        http.app[RESPONSES].put(body["id"], kept)


def _stored(http: web.Request) -> StoredResponse:
    name = http.match_info["response_id"]
    response = http.app[RESPONSES].get(name, _owner(http))
    if response is None:
        raise ApiError(404, f"Response with id {name[:100]!r} not found.", "response_id")
    return response


def _references(http: web.Request) -> References:
    return References(http.app[RESPONSES], _owner(http), http.client_max_size)


def _owner(http: web.Request) -> bytes:
    """A hash of the client's key: the responses of another key are not found."""
    if not http.app[SERVICE].args.keys():
        return b""
    return hashlib.sha256("\0".join(given_keys(http)).encode("utf-8", "surrogateescape")).digest()
