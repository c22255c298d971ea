"""Request bodies in, JSON bodies out; large ones in a thread, off the event loop.

Reading checks size, media type, JSON and field types, no semantics. A type error names its field as
`param`. Unknown fields are ignored, as in vLLM, and each name is logged once at debug level. How
many values a body may hold is limited before it is decoded: decoding is one call into C, which
keeps the interpreter to itself. So does orjson, 0.1 s for the log-probabilities of a long prompt:
`sliced_json` writes long arrays piece by piece, and between two pieces others have a turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web

from asyncllm.host import no_collection
from asyncllm.server.http.errors import ApiError, bad_request
from asyncllm.server.http.field_errors import field_error

logger = logging.getLogger(__name__)

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=msgspec.Struct)

JSON = "application/json"
WRONG_TYPE = "unsupported_media_type"
BODY_SECONDS = 60.0  # from the last header to the last byte of the body

# Of a body: arrays, objects, their members, and numbers with a fraction or an exponent, which take
# up to 0.4 us each. Texts and integers take a tenth of that, and are limited by their bytes.
MAX_BODY_VALUES = 2**17

_MAX_REMEMBERED_NAMES = 256
_VALUE_BYTES = b"[{:.eE"  # one of these stands in each such value, and outside strings
_STRING_OR_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{:.eE]', re.DOTALL)

_decoders: dict[Any, msgspec.json.Decoder] = {}
_seen_unknown: set[str] = set()


async def read_body(
    request: web.Request, wanted: type[RequestT] | Mapping[str, type[RequestT]]
) -> RequestT:
    """The body as `wanted`, or as the first of those whose field it has.

    Raises `ApiError` 400 or 413.
    """
    # Required, not only assumed: browsers let no web page send it to another origin unchecked.
    if request.headers.get("Content-Type") != JSON and request.content_type != JSON:
        raise bad_request("the request body must be application/json", code=WRONG_TYPE)
    raw = await _read(request)
    if len(raw) > MAX_BODY_VALUES:  # at least a byte each
        await request.app[OFF_LOOP].read(partial(_check_num_values, raw))
    kind = wanted if isinstance(wanted, type) else _kind_of(raw, wanted)
    parsed = _decode(raw, kind)
    if logger.isEnabledFor(logging.DEBUG):
        _log_unknown_fields(raw, kind)
    return parsed


def _kind_of(raw: bytes, kinds: Mapping[str, type[RequestT]]) -> type[RequestT]:
    given = _decode(raw, dict[str, msgspec.Raw])
    for name, kind in kinds.items():
        if name in given:
            return kind
    raise bad_request(f"the request needs one of {', '.join(kinds)}", next(iter(kinds)))


async def _read(request: web.Request) -> bytes:
    """The body as sent, decompressed; never more than the limit of it in memory."""
    limit, content = request.client_max_size, request.content
    try:
        if content.is_eof():  # most bodies came with their headers
            raw = content.read_nowait()
        elif (request.content_length or 0) > limit:
            raise _too_large(limit)
        else:
            async with asyncio.timeout(BODY_SECONDS):
                raw = await request.read()
    except TimeoutError:
        late = f"the request body took over {BODY_SECONDS:g} s"
        raise ApiError(408, late, close=True) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limit) from None
    except web.RequestPayloadError:
        raise ApiError(400, "the request body could not be read", close=True) from None
    if len(raw) > limit:
        raise _too_large(limit)
    return raw


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is over the limit of {limit} bytes", close=True)


def _check_num_values(raw: bytes) -> None:
    """Raises `ApiError` 400."""
    if sum(map(raw.count, _VALUE_BYTES)) <= MAX_BODY_VALUES:  # most bodies, soon counted
        return
    num_values = 0  # exactly, without what only stands in strings
    for found in _STRING_OR_VALUE.finditer(raw):
        num_values += found.group()[:1] != b'"'
        if num_values > MAX_BODY_VALUES:
            what = "arrays, objects, members and fractional numbers"
            raise bad_request(f"the request body has more than {MAX_BODY_VALUES} {what}")


def _decode(raw: bytes, wanted: type[T]) -> T:
    decoder = _decoders.get(wanted)
    if decoder is None:
        # Not strict: 8.0 is an integer in JSON Schema; "8" and "true" count as what they say.
        decoder = _decoders[wanted] = msgspec.json.Decoder(wanted, strict=False, float_hook=_finite)
    try:
        if len(raw) < LARGE_BODY_BYTES:
            return decoder.decode(raw)
        # 100,000 new lists are no garbage, but make the collector walk over them again and again.
        with no_collection():
            return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise field_error(str(error), wanted) from None
    except RecursionError:
        raise bad_request("the request body is nested too deeply") from None
    except ValueError as error:  # malformed JSON, or not UTF-8
        raise bad_request(f"the request body is not valid JSON: {error}") from None


def _finite(digits: str) -> float:
    """For numbers in fields of any type: msgspec itself takes 12 us for an 1e300."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError("Number out of range")
    return number


def _log_unknown_fields(raw: bytes, wanted: type[msgspec.Struct]) -> None:
    unknown = set(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    for name in sorted(unknown - set(wanted.__struct_fields__) - _seen_unknown):
        if len(_seen_unknown) < _MAX_REMEMBERED_NAMES:
            _seen_unknown.add(name)
            logger.debug("ignored unknown field %r of %s", name[:64], wanted.__name__)


# From here on, making the prompt of a body may take milliseconds: a chat template takes 0.5 us a
# byte where messages are short. A thread costs 0.1 ms.
LARGE_BODY_BYTES = 8 * 1024


class OffLoop:
    """A thread for requests and one for responses.

    Both run Python code that shares one interpreter, so a second thread of either would finish
    nothing earlier; and large responses do not keep requests waiting. What runs here must not touch
    what belongs to the loop: engine and connections.
    """

    def __init__(self) -> None:
        self._requests = ThreadPoolExecutor(1, "asyncllm-requests")  # started by its first work
        self._responses = ThreadPoolExecutor(1, "asyncllm-answers")

    async def read(self, work: Callable[[], T]) -> T:
        """Run `work`, unless it is cancelled before its turn."""
        return await asyncio.get_running_loop().run_in_executor(self._requests, work)

    async def write(self, work: Callable[[], T]) -> T:
        """The same as `read`, for responses."""
        return await asyncio.get_running_loop().run_in_executor(self._responses, work)

    async def close(self, _: Any = None) -> None:
        for threads in (self._requests, self._responses):
            threads.shutdown(wait=False, cancel_futures=True)


OFF_LOOP = web.AppKey("off_loop", OffLoop)


async def prepare(http: web.Request, work: Callable[[], T], is_large: bool = False) -> T:
    """Return what `work` makes of a body that has been read: off the loop if the body is large.

    is_large: there is more to it than the body.
    """
    if not is_large and http.content.total_bytes < LARGE_BODY_BYTES:  # decompressed
        return work()
    return await http.app[OFF_LOOP].read(work)


def json_response(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


async def render_response(
    http: web.Request, render: Callable[[], Any], is_large: bool
) -> web.Response:
    """The JSON of what `render` returns, made off the loop if it is large."""
    if not is_large:
        return json_response(render())
    body = await http.app[OFF_LOOP].write(lambda: orjson.dumps(render()))
    return web.Response(body=body, content_type="application/json")


SLICE = 1024  # items: with 20 log-probabilities each, 2 ms


def sliced_json(items: Iterable[Any]) -> orjson.Fragment:
    """An array of `items`, which are made as they are written, for a body that orjson writes."""
    rest, pieces = iter(items), []
    while piece := list(islice(rest, SLICE)):
        pieces.append(orjson.dumps(piece)[1:-1])
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")
