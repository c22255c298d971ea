"""What the routes share: the engine, the names it serves under, and the calls in progress.

`stream_to`, `answer_whole` and `answer_message` are the ways a call runs; in all the engine's
requests end with the handler, whatever ends the handler: the last token, an error, or a client that
went away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import orjson
from aiohttp import web

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.errors import InvalidRequestError
from asyncllm.formats import ModelFormat, resolve
from asyncllm.server.answer_events import AnswerSink, MessageCollector, ParsedAnswer, PlainParser
from asyncllm.server.args import ServerArgs
from asyncllm.server.call import Call
from asyncllm.server.collect import CollectedAnswer
from asyncllm.server.errors import ApiError
from asyncllm.server.generation import Consumer, Generation
from asyncllm.server.known_params import KnownParams
from asyncllm.server.logprobs import TokenNames
from asyncllm.server.off_loop import LARGE_BODY_BYTES, OffLoop
from asyncllm.server.protocol import GenerationRequest
from asyncllm.server.sse import FrameQueue, SSEStream

T = TypeVar("T")

TURNS_TO_LAUNCH = 2  # of the loop: an engine that was idle has then launched the request's step
FORCED_CALLS = "llama3_json"  # {"name": ..., "parameters": ...}, the plainest of the formats


class CallObserver(Protocol):
    """Told of each call, in the context of its handler."""

    def begin(self, call: Call) -> None: ...

    def end(self, call: Call) -> None: ...


class Service:
    def __init__(self, engine: AsyncLLMEngine, args: ServerArgs) -> None:
        """Raises `ValueError` for the name of a parser that there is not."""
        resolve(None, None, args.tool_call_parser, engine.config.reasoning_parser)
        self.engine = engine
        self.args = args
        self.model_names = engine.config.served_model_names
        self.frames = FrameQueue()
        self.off_loop = OffLoop()
        self.known_completions = KnownParams()
        self.draining = False
        self.call_observers: list[CallObserver] = []
        self._live: set[Generation] = set()
        self._emptied = asyncio.Event()

    @cached_property
    def answer_format(self) -> ModelFormat | None:
        """How this model writes reasoning and tool calls; None: all that it says is content.

        For when the engine has started.
        """
        return self._resolve_format(self.args.tool_call_parser)

    @cached_property
    def forced_format(self) -> ModelFormat | None:
        """For calls that a grammar forces a model to write which knows no format for them."""
        return self._resolve_format(FORCED_CALLS)

    @cached_property
    def reasons_unasked(self) -> bool:
        """Whether its chat template asks for reasoning where a request says nothing of it."""
        render = partial(self.engine.tokenizer.render_chat, [{"role": "user", "content": "?"}])
        try:
            return render() == render(template_kwargs={"enable_thinking": True})
        except InvalidRequestError:  # a template that wants other messages: it may
            return True

    def _resolve_format(self, tool_call_parser: str) -> ModelFormat | None:
        tokenizer = self.engine.tokenizer
        return resolve(
            tokenizer.chat_template,
            tokenizer.special_tokens,
            tool_call_parser,
            self.engine.config.reasoning_parser,
            tokenizer.response_template,
        )

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def idle(self) -> None:
        """Until no answer is in progress."""
        while self._live:
            self._emptied.clear()
            await self._emptied.wait()

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a name that is not served; none at all means the first."""
        if name is not None and name not in self.model_names:
            raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")

    def token_names(self, request: GenerationRequest) -> TokenNames:
        as_ids = request.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self.args.return_tokens_as_token_ids
        return TokenNames(self.engine.tokenizer, as_ids)

    def check_open(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is shutting down")

    def fail_live(self, error: ApiError) -> None:
        """End every answer in progress with an error: the server goes."""
        for generation in list(self._live):
            generation.fail(error, "shutdown")

    def begin(self, call: Call, make_consumer: Callable[[], Consumer]) -> Generation:
        """The engine's share of a call. Whatever becomes of it, `end` it."""
        for observer in self.call_observers:
            observer.begin(call)
        generation = Generation(self.engine, call, make_consumer)
        self._live.add(generation)
        return generation

    def end(self, generation: Generation) -> None:
        """Abort what has not finished."""
        self._live.discard(generation)
        if not self._live:
            self._emptied.set()
        generation.abort()
        for observer in self.call_observers:
            observer.end(generation.call)


SERVICE = web.AppKey("service", Service)


def json_response(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


async def prepared(http: web.Request, prepare: Callable[[], T], is_large: bool = False) -> T:
    """What `prepare` makes of a body that has been read: off the loop if the body is large.

    is_large: there is more to it than the body.
    """
    if not is_large and http.content.total_bytes < LARGE_BODY_BYTES:  # decompressed
        return prepare()
    return await http.app[SERVICE].off_loop.read(prepare)


async def answer_response(
    service: Service, call: Call, render: Callable[[], dict[str, Any]]
) -> web.Response:
    """The whole answer's; log-probabilities may be 100,000s of entries: those off the loop."""
    params = call.params
    is_large = params.logprobs is not None or params.prompt_logprobs is not None
    return await written(service, render, is_large)


async def written(service: Service, render: Callable[[], Any], is_large: bool) -> web.Response:
    """The JSON of what `render` returns, made off the loop if it is large."""
    if not is_large:
        return json_response(render())
    body = await service.off_loop.write(lambda: orjson.dumps(render()))
    return web.Response(body=body, content_type="application/json")


async def answer_whole(service: Service, call: Call) -> CollectedAnswer:
    answer = CollectedAnswer(call)
    await collect(service, call, lambda: answer)
    return answer


async def answer_message(service: Service, call: Call) -> MessageCollector:
    """An answer of messages, whole."""
    message = MessageCollector(call)
    await collect(service, call, partial(parsed, call, message))
    return message


def parsed(call: Call, sink: AnswerSink) -> ParsedAnswer:
    """For `sink`, as the call's own parser reads it."""
    return ParsedAnswer(call, call.new_parser or PlainParser, sink)


async def collect(service: Service, call: Call, make_consumer: Callable[[], Consumer]) -> None:
    """Let a consumer have the whole answer. Raises the `ApiError` that ended it."""
    generation = service.begin(call, make_consumer)
    try:
        await generation.submit()
        await generation.wait()
    finally:
        service.end(generation)


async def stream_to(
    sse: SSEStream, service: Service, call: Call, make_consumer: Callable[[], Consumer]
) -> web.StreamResponse:
    """Errors until the request is queued have their own status; later ones are events.

    The consumer is made and the headers, a system call, are sent while the device is at work.
    """
    generation = service.begin(call, make_consumer)
    try:
        await generation.submit()
        if generation.error is not None:
            raise generation.error
        for _ in range(TURNS_TO_LAUNCH):
            await asyncio.sleep(0)
        _ = generation.consumer
        try:
            await sse.open()
            await sse.run()
        except ConnectionError:
            pass  # the client is gone or was dropped; aiohttp notices by itself
    finally:
        if sse.too_slow:
            generation.abort_cause = "slow_reader"
        service.end(generation)
    return sse.response
