"""The engine requests of one HTTP call, from queue to last token, or until the client disconnects.

One engine request per prompt. The engine calls `_receive` and its `_text_sink` on the event loop in
the middle of its step, so two rules hold there: nothing escapes into the engine, and nothing calls
the engine back; an error is handed to the consumer, whose end wakes the handler, and the handler's
`finally` aborts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.output_state import TextSink
from asyncllm.engine.stats import AbortCause
from asyncllm.errors import InvalidRequestError, QueueFullError
from asyncllm.outputs import RequestOutput
from asyncllm.server.http.errors import ApiError, as_api_error, internal_error, overloaded
from asyncllm.server.inputs.call import Call
from asyncllm.server.inputs.refusals import renamed
from asyncllm.structured_outputs import PARAM

logger = logging.getLogger(__name__)

PROMPTS_PER_TURN = 8  # up to 0.2 ms each; then other tasks run


class Consumer(Protocol):
    """Receives a call's outputs: a stream or a collector. Ends by exactly one of finish, fail."""

    def feed(self, prompt_index: int, output: RequestOutput) -> None: ...

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        """Add text to a prompt's only choice, between its first and its last `feed`."""
        ...

    def finish(self) -> None: ...

    def fail(self, error: ApiError) -> None: ...


class Generation:
    __slots__ = (
        "_consumer",
        "_ended",
        "_engine",
        "_is_aborted",
        "_live",
        "_make_consumer",
        "_num_open",
        "abort_cause",
        "call",
        "error",
    )

    def __init__(
        self, engine: AsyncLLMEngine, call: Call, make_consumer: Callable[[], Consumer]
    ) -> None:
        self.call = call
        self.error: ApiError | None = None
        self.abort_cause: AbortCause = "disconnect"  # of requests unfinished at the end
        self._engine = engine
        self._make_consumer = make_consumer
        self._consumer: Consumer | None = None
        self._num_open = len(call.prompts)
        self._live: set[str] = set()
        self._is_aborted = False  # late outputs are dropped
        self._ended: asyncio.Future[None] | None = None  # of who waits for it

    @property
    def consumer(self) -> Consumer:
        """Made at the first access: not before the engine has the request."""
        if self._consumer is None:
            self._consumer = self._make_consumer()
        return self._consumer

    async def submit(self) -> None:
        """Queue every prompt. Raises what the engine raises; `abort` then clears the rest."""
        call = self.call
        for index, prompt in enumerate(call.prompts):
            if index and index % PROMPTS_PER_TURN == 0:
                await asyncio.sleep(0)
            request_id = call.request_id(index)
            self._live.add(request_id)
            try:
                await self._engine.add_request(
                    request_id,
                    prompt,
                    call.params,
                    partial(self._receive, request_id, index),
                    text_sink=None if call.wants_outputs else self._text_sink(index),
                    priority=call.priority,
                    cache_salt=call.cache_salt,
                    lora_request=call.adapter,
                )
            except InvalidRequestError as error:
                if (error.param or "").startswith(PARAM):  # others are named by who catches them
                    raise self._named(error) from error
                raise

    async def wait(self) -> None:
        """Return after the last token. Raises the `ApiError` that ended the call."""
        if self._num_open and self.error is None:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Idempotent, and nothing to do once every request has finished."""
        self._is_aborted = True
        while self._live:
            self._engine.abort(self._live.pop(), self.abort_cause)

    def fail(self, error: ApiError, cause: AbortCause = "server_error") -> None:
        """End the call with an error; the handler then aborts what still runs, by `cause`."""
        if not self._is_aborted and self.error is None and self._num_open:
            self.error = error
            self.abort_cause = cause
            self._end_wait()
            try:
                self.consumer.fail(error)
            except Exception:  # whatever it is, the engine's step must not see it
                logger.exception("call %s: its error could not be reported", self.call.id)

    def _receive(self, request_id: str, index: int, output: RequestOutput) -> None:
        if self._is_aborted or self.error is not None:
            return
        try:
            if output.error is not None:
                self.fail(self._client_error(output.error))
                return
            self.consumer.feed(index, output)
            if output.finished:
                self._live.discard(request_id)
                if self._num_open == 1:
                    self.consumer.finish()  # as long as it is open what this raises is its error
                    self._end_wait()
                self._num_open -= 1
        except Exception as error:
            self.fail(as_api_error(error))

    def _end_wait(self) -> None:
        """Wake `wait`: the consumer's last call has been made."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _client_error(self, error: Exception) -> ApiError:
        """The client's view of an error after the request was queued."""
        if isinstance(error, QueueFullError):
            return overloaded()
        if isinstance(error, InvalidRequestError):
            return as_api_error(self._named(error))
        # Its message is for the operator: it may hold paths and addresses.
        logger.error("%s", error)
        return internal_error("the engine failed to finish this request")

    def _named(self, error: InvalidRequestError) -> InvalidRequestError:
        """With the client's own name of the field."""
        return renamed(error, self.call.client_name(error.param))

    def _text_sink(self, index: int) -> TextSink:
        """A function of its own: a method of a partial is two calls more for each token."""

        def receive_text(text: str, num_tokens: int) -> None:
            if self._is_aborted or self.error is not None:
                return
            try:
                assert self._consumer is not None, "an output comes before text"
                self._consumer.feed_text(index, text, num_tokens)
            except Exception as error:
                self.fail(as_api_error(error))

        return receive_text
