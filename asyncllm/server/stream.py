"""The streamed answer: engine deltas in, SSE frames out, in OpenAI's chunk shapes.

The chunks of one choice differ only in their text, so all around it is rendered once and per token
only the text is encoded. A chunk with more to say (logprobs, a finish_reason, running usage) is put
together from the same pieces. What a choice opens with (chat: the role; `echo`: the prompt) is sent
together with its first news, so the first byte a client sees is an honest first token.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.server.call import Call
from asyncllm.server.errors import ApiError
from asyncllm.server.protocol import StreamOptions
from asyncllm.server.sse import SSEStream
from asyncllm.server.usage import Usage

DONE = b"data: [DONE]\n\n"


class ChunkShape(Protocol):
    """What chat and completions chunks do not share."""

    object_name: str
    before_text: bytes  # a choice's own fields: before_text, the text as JSON, after_text
    after_text: bytes

    def opening(self, frames: ChoiceFrames, output: RequestOutput) -> bytes:
        """The frames that come before the choice's first text, possibly none."""
        ...

    def text(self, completion: CompletionOutput) -> str: ...

    def logprobs(self, choice_index: int, completion: CompletionOutput) -> Any:
        """The chunk's logprobs, or None."""
        ...

    def token_ids(self, completion: CompletionOutput) -> list[int]:
        """The chunk's, where the call wants them."""
        ...


class ChoiceFrames:
    """The pieces of one choice's frames."""

    def __init__(self, call: Call, choice_index: int, shape: ChunkShape) -> None:
        self.index = choice_index
        self.num_tokens = 0
        self.opened = False
        head = orjson.dumps(
            {
                "id": call.id,
                "object": shape.object_name,
                "created": call.created,
                "model": call.model,
            }
        )
        self._before_choice = b"data: " + head[:-1] + b',"choices":['
        self._before_text = b'%b{"index":%d,%b' % (
            self._before_choice,
            choice_index,
            shape.before_text,
        )
        self._after_text = shape.after_text
        self._plain_end = shape.after_text + b',"logprobs":null,"finish_reason":null}]}\n\n'

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

    def choice(self, fields: dict[str, Any], prompt_token_ids: list[int] | None = None) -> bytes:
        """A frame of any other shape."""
        return b"%b%b]%b}\n\n" % (
            self._before_choice,
            orjson.dumps({"index": self.index, **fields}),
            b',"prompt_token_ids":' + orjson.dumps(prompt_token_ids) if prompt_token_ids else b"",
        )

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The frame with empty choices that ends a stream with `include_usage`."""
        return b'%b],"usage":%b}\n\n' % (self._before_choice, orjson.dumps(usage))


class StreamedAnswer:
    """A `Consumer` that writes to one SSE stream: one write per engine step."""

    def __init__(
        self, sse: SSEStream, call: Call, shape: ChunkShape, options: StreamOptions | None
    ) -> None:
        self._sse = sse
        self._shape = shape
        self._n = call.params.n
        self._choices = [ChoiceFrames(call, i, shape) for i in range(call.num_choices)]
        self._usage = Usage()
        self._include_usage = bool(options and options.include_usage)
        # As in vLLM, running usage needs include_usage too.
        self._running_usage = bool(
            self._include_usage and options and options.continuous_usage_stats
        )
        self._token_ids = call.return_token_ids
        self._plain = not (
            self._running_usage or self._token_ids or call.params.logprobs is not None
        )

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        self._usage.count(prompt_index, output)
        first_choice = prompt_index * self._n
        frames = []
        for completion in output.outputs:
            choice = self._choices[first_choice + completion.index]
            if not choice.opened:
                choice.opened = True
                frames.append(self._shape.opening(choice, output))
            if self._plain and completion.finish_reason is None:
                text = self._shape.text(completion)
                if text:  # empty while a stop string or a character is still open
                    frames.append(choice.plain(text))
            else:
                frames.append(self._full_frame(choice, prompt_index, completion))
        if frames:
            self._sse.push(b"".join(frames))

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        choice = self._choices[prompt_index * self._n]
        self._usage.completion_tokens += num_tokens
        if self._running_usage:
            choice.num_tokens += num_tokens
            usage = self._usage.of_choice(prompt_index, choice.num_tokens)
            self._sse.push(choice.full(text, None, usage=usage))
        elif text:  # empty while a character is still open
            self._sse.push(choice.plain(text))

    def finish(self) -> None:
        end = DONE
        if self._include_usage:
            end = self._choices[0].usage(self._usage.as_dict()) + DONE
        self._sse.end(end)

    def fail(self, error: ApiError) -> None:
        """One error event, and no [DONE]: a client must not take the text for a whole answer."""
        self._sse.end(b"data: " + error.body() + b"\n\n")

    def _full_frame(
        self, choice: ChoiceFrames, prompt_index: int, completion: CompletionOutput
    ) -> bytes:
        choice.num_tokens += len(completion.token_ids)
        return choice.full(
            self._shape.text(completion),
            self._shape.logprobs(choice.index, completion),
            completion.finish_reason,
            completion.stop_reason,
            self._usage.of_choice(prompt_index, choice.num_tokens) if self._running_usage else None,
            **({"token_ids": self._shape.token_ids(completion)} if self._token_ids else {}),
        )
