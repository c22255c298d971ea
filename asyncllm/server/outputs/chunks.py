"""Streamed chunks: engine deltas in, SSE frames out, in OpenAI's shapes.

The chunks of one choice differ only in their text, so all around it is rendered once and per token
only the text is encoded. A chunk with more fields (logprobs, a finish_reason, running usage) is put
together from the same pieces. What a choice opens with (chat: the role; `echo`: the prompt) is sent
together with its first token, so the first byte a client sees is an honest first token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import orjson

from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.call import SYSTEM_FINGERPRINT, Call, Usage
from asyncllm.server.protocol import StreamOptions

DONE = b"data: [DONE]\n\n"


class TextPlace(NamedTuple):
    """The place of the text in a chunk."""

    object_name: str
    before_text: bytes  # a choice's own fields: before_text, the text as JSON, after_text
    after_text: bytes


class ChunkShape(Protocol):
    """The differences between chat and completions chunks."""

    place: TextPlace

    def opening(
        self, frames: ChoiceFrames, output: RequestOutput, usage: dict[str, Any] | None
    ) -> bytes:
        """The frames that come before the choice's first text, possibly none.

        usage: before the first token, for a stream with running usage.
        """
        ...

    def text(self, completion: CompletionOutput) -> str: ...

    def logprobs(self, choice_index: int, completion: CompletionOutput) -> Any:
        """The chunk's logprobs, or None."""
        ...

    def token_ids(self, completion: CompletionOutput) -> list[int]:
        """The chunk's token ids, where the call returns them."""
        ...


class ChoiceFrames:
    """The pieces of one choice's frames."""

    __slots__ = (
        "_after_text",
        "_before_choice",
        "_before_text",
        "_plain_end",
        "index",
        "num_tokens",
        "opened",
    )

    def __init__(self, call: Call, choice_index: int, place: TextPlace) -> None:
        self.index = choice_index
        self.num_tokens = 0
        self.opened = False
        head = orjson.dumps(
            {
                "id": call.id,
                "object": place.object_name,
                "created": call.created,
                "model": call.model,
                "system_fingerprint": SYSTEM_FINGERPRINT,
            }
        )
        self._before_choice = b"data: " + head[:-1] + b',"choices":['
        self._before_text = b'%b{"index":%d,%b' % (
            self._before_choice,
            choice_index,
            place.before_text,
        )
        self._after_text = place.after_text
        self._plain_end = _plain_end(place.after_text)

    def plain(self, text: str) -> bytes:
        return self._before_text + orjson.dumps(text) + self._plain_end

    def full(
        self,
        text: str,
        logprobs: Any,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        usage: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        """`more`: fields of the choice."""
        rest = orjson.dumps(
            {
                "logprobs": logprobs,
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
                **more,
            }
        )
        return b"%b%b%b,%b]%b}\n\n" % (
            self._before_text,
            orjson.dumps(text),
            self._after_text,
            rest[1:],
            b',"usage":' + orjson.dumps(usage) if usage else b"",
        )

    def choice(self, fields: dict[str, Any], **more: Any) -> bytes:
        """A frame of any other shape. `more`: fields beside the choices, where not None."""
        more = {name: value for name, value in more.items() if value is not None}
        end = b"," + orjson.dumps(more)[1:] if more else b"}"
        fields = {"index": self.index, **fields}
        return b"%b%b]%b\n\n" % (self._before_choice, orjson.dumps(fields), end)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The frame with empty choices that ends a stream with `include_usage`."""
        return b'%b],"usage":%b}\n\n' % (self._before_choice, orjson.dumps(usage))


@cache
def _plain_end(after_text: bytes) -> bytes:
    """Shared by all streams, which read it for each token."""
    return after_text + b',"logprobs":null,"finish_reason":null}]}\n\n'


class ChunkOptions:
    """The effect of `stream_options`, and the end of a stream of chunks."""

    def __init__(self, sse: SSEStream, options: StreamOptions | None) -> None:
        self._sse = sse
        self._include_usage = bool(options and options.include_usage)
        # As in vLLM, running usage needs include_usage too.
        self.running_usage = bool(
            self._include_usage and options and options.continuous_usage_stats
        )

    def finish(self, usage_frame: Callable[[dict[str, Any]], bytes], usage: Usage) -> None:
        self._sse.end(usage_frame(usage.as_dict()) + DONE if self._include_usage else DONE)

    def fail(self, error: ApiError) -> None:
        """One error event, and no [DONE]: a client must not take the text for complete."""
        self._sse.end(b"data: " + error.body() + b"\n\n")


class ChunkStream:
    """A `Consumer` that writes to one SSE stream: one write per engine step.

    Each token has its chunk at once, be its text empty while a character or a stop string is still
    open: clients count steps by it (as with vLLM).
    """

    __slots__ = ("_choices", "_n", "_options", "_plain", "_shape", "_sse", "_token_ids", "_usage")

    def __init__(
        self, sse: SSEStream, call: Call, shape: ChunkShape, options: StreamOptions | None
    ) -> None:
        self._sse = sse
        self._shape = shape
        self._n = call.params.n
        self._choices = [ChoiceFrames(call, i, shape.place) for i in range(call.num_choices)]
        self._usage = Usage(call.shows_cached, call.prompt_only)
        self._options = ChunkOptions(sse, options)
        self._token_ids = call.return_token_ids
        self._plain = not call.wants_outputs and call.params.logprobs is None

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        self._usage.count(prompt_index, output)
        first_choice = prompt_index * self._n
        frames = []
        for completion in output.outputs:
            choice = self._choices[first_choice + completion.index]
            prompt_ids = None
            if not choice.opened:
                choice.opened = True
                usage = self._running_usage(choice, prompt_index)
                frames.append(self._shape.opening(choice, output, usage))
                if self._token_ids and not frames[-1]:
                    prompt_ids = output.prompt_token_ids  # they come with the first token
            if self._plain and completion.finish_reason is None:
                frames.append(choice.plain(self._shape.text(completion)))
            else:
                frames.append(self._full_frame(choice, prompt_index, completion, prompt_ids))
        if frames:
            self._sse.push(b"".join(frames))

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        self._usage.completion_tokens += num_tokens
        self._sse.push(self._choices[prompt_index * self._n].plain(text))

    def finish(self) -> None:
        self._options.finish(self._choices[0].usage, self._usage)

    def fail(self, error: ApiError) -> None:
        self._options.fail(error)

    def _full_frame(
        self,
        choice: ChoiceFrames,
        prompt_index: int,
        completion: CompletionOutput,
        prompt_ids: list[int] | None,
    ) -> bytes:
        choice.num_tokens += len(self._shape.token_ids(completion))
        usage = self._running_usage(choice, prompt_index)
        more: dict[str, Any] = {}
        if self._token_ids:
            more["token_ids"] = self._shape.token_ids(completion)
        if prompt_ids is not None:
            more["prompt_token_ids"] = prompt_ids
        return choice.full(
            self._shape.text(completion),
            self._shape.logprobs(choice.index, completion),
            completion.finish_reason,
            completion.stop_reason,
            usage,
            **more,
        )

    def _running_usage(self, choice: ChoiceFrames, prompt_index: int) -> dict[str, Any] | None:
        if not self._options.running_usage:
            return None
        return self._usage.of_choice(prompt_index, choice.num_tokens)
