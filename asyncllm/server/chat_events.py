"""A parsed chat answer as chat.completion.chunk events: content, reasoning, tool calls.

The `AnswerSink` of a streamed chat whose text is more than content. Each event of the parser is a
chunk; a plain piece of content or reasoning costs one encoded string, all around it is rendered
once. What a step says beside its text (logprobs, token ids, running usage) goes with its first
chunk, or waits for the next where the parser held the text back.
"""

from __future__ import annotations

from typing import Any

from asyncllm.formats.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from asyncllm.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from asyncllm.server.call import Call
from asyncllm.server.chat_view import ChatView
from asyncllm.server.errors import ApiError
from asyncllm.server.protocol import StreamOptions
from asyncllm.server.sse import SSEStream
from asyncllm.server.stream import ChoiceFrames, ChunkOptions
from asyncllm.server.usage import Usage


class _ReasoningChunks:
    """Where a piece of reasoning stands in a chunk."""

    object_name = "chat.completion.chunk"
    before_text = b'"delta":{"reasoning":'
    after_text = b"}"


class _Choice:
    """One choice's frames, and what is to be said with its next chunk."""

    def __init__(self, call: Call, index: int, view: ChatView) -> None:
        self.content = ChoiceFrames(call, index, view)
        self.reasoning = ChoiceFrames(call, index, _ReasoningChunks())
        self.num_tokens = 0
        self.opening = b""
        self.logprobs: SampleLogprobs = []
        self.token_ids: list[int] = []


class ChatEvents:
    def __init__(
        self,
        sse: SSEStream,
        call: Call,
        view: ChatView,
        options: StreamOptions | None,
        usage: Usage,
    ) -> None:
        """`usage` is the answer's, which counts before it speaks."""
        self._sse = sse
        self._usage = usage
        self._view = view
        self._options = ChunkOptions(sse, options)
        self._plain = not call.wants_outputs and call.params.logprobs is None
        self._includes_reasoning = view.include_reasoning
        self._wants_token_ids = call.return_token_ids
        self._choices = [_Choice(call, i, view) for i in range(call.num_choices)]

    def opened(self, choice: int, output: RequestOutput) -> None:
        state = self._choices[choice]
        state.opening = self._view.opening(state.content, output)

    def said(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        state = self._choices[choice]
        if not self._includes_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if self._plain and len(events) == 1 and not state.opening:  # most steps
            self._sse.push(self._plain_frame(state, events[0]))
            return
        frames = [state.opening]
        state.opening = b""
        if self._plain:
            frames += [self._plain_frame(state, event) for event in events]
        else:
            if completion is not None:
                state.num_tokens += len(completion.token_ids)
                state.token_ids += completion.token_ids
                state.logprobs += completion.logprobs or ()
            frames += [self._full_frame(state, self._delta(event)) for event in events]
        self._sse.push(b"".join(frames))

    def ended(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        state = self._choices[choice]
        end = {
            "finish_reason": self._view.finish_reason(finish_reason),
            "stop_reason": stop_reason,
        }
        self._sse.push(self._full_frame(state, {}, end))

    def finish(self, usage: Usage) -> None:
        self._options.finish(self._choices[0].content, usage)

    def fail(self, error: ApiError) -> None:
        self._options.fail(error)

    def _plain_frame(self, state: _Choice, event: Event) -> bytes:
        if isinstance(event, Content):
            return state.content.plain(event.text)
        if isinstance(event, Reasoning):
            return state.reasoning.plain(event.text)
        delta = self._delta(event)
        return state.content.choice({"delta": delta, "logprobs": None, "finish_reason": None})

    def _full_frame(
        self, state: _Choice, delta: dict[str, Any], end: dict[str, Any] | None = None
    ) -> bytes:
        fields = {"delta": delta, "logprobs": None, "finish_reason": None, **(end or {})}
        if state.logprobs:
            fields["logprobs"] = self._view.render_logprobs(state.logprobs)
            state.logprobs = []
        if self._wants_token_ids:
            fields["token_ids"], state.token_ids = state.token_ids, []
        usage = None
        if self._options.running_usage:
            usage = self._usage.of_choice(0, state.num_tokens)
        return state.content.choice(fields, usage=usage)

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text}
            case ToolCallBegin(index, call_id, name):
                return self._view.call_begin(index, call_id, name)
            case ToolCallArguments(index, text):
                return self._view.call_arguments(index, text)
