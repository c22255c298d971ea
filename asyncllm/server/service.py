"""`Service` is what the handlers share: the engine, its model names and output format, live calls.

A call runs by `stream` or by `collect`. In both the engine's requests end with the handler,
whatever ends the handler: the last token, an error, or a client that went away.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from aiohttp import web

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.errors import InvalidRequestError
from asyncllm.formats import ModelFormat, resolve
from asyncllm.lora import LoRARequest
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.sse import FrameQueue, SSEStream
from asyncllm.server.inputs.call import Call
from asyncllm.server.outputs.generation import Consumer, Generation
from asyncllm.server.outputs.interval import EveryNTokens
from asyncllm.server.outputs.logprobs import TokenNames
from asyncllm.server.protocol import GenerationRequest, StreamOptions

if TYPE_CHECKING:
    from asyncllm.server.observability.tracing import Tracing

T = TypeVar("T")

ITERATIONS_TO_LAUNCH = 2  # of the event loop: an idle engine has then launched the step
ALL_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)
FORCED_CALLS = "llama3_json"  # {"name": ..., "parameters": ...}, the plainest of the formats


class StreamingRequest(Protocol):
    stream: bool | None
    stream_options: StreamOptions | None


class Service:
    def __init__(self, engine: AsyncLLMEngine, args: ServerArgs) -> None:
        """Raises `ValueError` for the name of a parser that there is not."""
        resolve(None, None, args.tool_call_parser, engine.config.reasoning_parser)
        self.engine = engine
        self.args = args
        self.model_names = engine.config.served_model_names
        self.frames = FrameQueue()
        self.draining = False
        self.tracing: Tracing | None = None
        self._live: set[Generation] = set()
        self._emptied = asyncio.Event()

    @cached_property
    def answer_format(self) -> ModelFormat | None:
        """The model's format of reasoning and tool calls; None: all output is content.

        To be read once the engine has started.
        """
        return self._resolve_format(self.args.tool_call_parser)

    @cached_property
    def forced_format(self) -> ModelFormat | None:
        """The format of forced calls for a model that has none."""
        return self._resolve_format(FORCED_CALLS)

    @cached_property
    def special_texts(self) -> re.Pattern[str] | None:
        """The texts that a tokenizer takes for special tokens wherever they stand."""
        texts = [text for text in self.engine.tokenizer.special_tokens if len(text) > 1]
        return re.compile("|".join(map(re.escape, sorted(texts, reverse=True)))) if texts else None

    @cached_property
    def reasons_by_default(self) -> bool:
        """Whether its chat template turns reasoning on where a request leaves it open."""
        render = partial(self.engine.tokenizer.render_chat, [{"role": "user", "content": "?"}])
        try:
            return render() == render(template_kwargs={"enable_thinking": True})
        except InvalidRequestError:  # the template needs other messages: assume it may
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
        """Return when no call is in progress."""
        while self._live:
            self._emptied.clear()
            await self._emptied.wait()

    def check_model(self, name: str | None) -> LoRARequest | None:
        """The adapter of that name, None for the model's own; none at all means the first.

        Raises `ApiError` 404 for a name that is not served."""
        if name is None or name in self.model_names:
            return None
        if (adapter := self.engine.find_lora(name)) is not None:
            return adapter
        raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")

    def token_names(self, request: GenerationRequest) -> TokenNames:
        as_ids = request.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self.args.return_tokens_as_token_ids
        return TokenNames(None if as_ids else self.engine.tokenizer)

    def force_usage(self, request: StreamingRequest) -> None:
        """Its stream reports usage whatever it says."""
        if request.stream:
            request.stream_options = ALL_USAGE

    def check_open(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is shutting down")

    def fail_live(self, error: ApiError) -> None:
        """End every call in progress with an error: the server shuts down."""
        for generation in list(self._live):
            generation.fail(error, "shutdown")

    async def collect(self, call: Call, make_consumer: Callable[[], Consumer]) -> None:
        """Feed a consumer until the end. Raises the `ApiError` that ended the call."""
        wait = await self.collect_later(call, make_consumer)
        await wait()

    async def collect_later(
        self, call: Call, make_consumer: Callable[[], Consumer]
    ) -> Callable[[], Awaitable[None]]:
        """As `collect`, in two: return once its requests are queued. What is returned waits for
        the end, and must be called."""
        generation = self._begin(call, make_consumer)
        try:
            await generation.submit()
        except BaseException:
            self._end(generation)
            raise

        async def wait() -> None:
            try:
                await generation.wait()
            finally:
                self._end(generation)

        return wait

    async def stream(
        self, sse: SSEStream, call: Call, make_consumer: Callable[[], Consumer]
    ) -> web.StreamResponse:
        """Errors until the request is queued have their own status; later ones are events.

        The consumer is made and the headers, a system call, are sent while the device is at work.
        """
        if self.args.stream_interval > 1:
            make_consumer = self.paced(call, make_consumer)
        generation = self._begin(call, make_consumer)
        try:
            await generation.submit()
            if generation.error is not None:
                raise generation.error
            for _ in range(ITERATIONS_TO_LAUNCH):
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
            self._end(generation)
        return sse.response

    def paced(self, call: Call, make_consumer: Callable[[], Consumer]) -> Callable[[], Consumer]:
        """With --stream-interval tokens in each chunk."""
        interval = self.args.stream_interval
        return lambda: EveryNTokens(make_consumer(), interval, len(call.prompts))

    def _begin(self, call: Call, make_consumer: Callable[[], Consumer]) -> Generation:
        if self.tracing is not None:
            self.tracing.begin(call)
        generation = Generation(self.engine, call, make_consumer)
        self._live.add(generation)
        return generation

    def _end(self, generation: Generation) -> None:
        """Abort what has not finished."""
        self._live.discard(generation)
        if not self._live:
            self._emptied.set()
        generation.abort()
        if self.tracing is not None:
            self.tracing.end(generation.call)


SERVICE = web.AppKey("service", Service)
