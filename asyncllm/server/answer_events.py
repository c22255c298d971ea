"""An answer as events: the engine's deltas, read by a parser per choice, for whoever renders them.

`ParsedAnswer` is the `Consumer`; an `AnswerSink` behind it streams the events in the shape of its
API, or, as `MessageCollector` does, adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from asyncllm.formats.events import (
    AnswerParser,
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from asyncllm.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from asyncllm.server.call import Call
from asyncllm.server.errors import ApiError
from asyncllm.server.usage import Usage


class AnswerSink(Protocol):
    """Called on the loop, in the middle of a step: must not block. One of finish and fail is last.

    `choice` is the choice's index in the answer.
    """

    def opened(self, choice: int, output: RequestOutput) -> None:
        """Before the choice's first events."""
        ...

    def said(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        """A step's news, possibly no event. `completion`: where there is more to them than text."""
        ...

    def ended(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        """After its last events; "tool_calls" where the model stopped after calls."""
        ...

    def finish(self, usage: Usage) -> None: ...

    def fail(self, error: ApiError) -> None: ...


class PlainParser:
    """For a format with nothing to find: all of it is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def close(self) -> list[Event]:
        return []


class ParsedAnswer:
    """A `Consumer`. `new_parser` makes the parser of one choice."""

    def __init__(
        self,
        call: Call,
        new_parser: Callable[[], AnswerParser],
        sink: AnswerSink,
        usage: Usage | None = None,
    ) -> None:
        """`usage`: to count in, for a sink that reads it on the way."""
        self.usage = usage or Usage(call.shows_cached)
        self._n = call.params.n
        self._sink = sink
        self._parsers = [new_parser() for _ in range(call.num_choices)]
        self._opened = [False] * call.num_choices
        self._called = [False] * call.num_choices
        self._is_thinking = [False] * call.num_choices

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)
        for completion in output.outputs:
            choice = prompt_index * self._n + completion.index
            if not self._opened[choice]:
                self._opened[choice] = True
                self._sink.opened(choice, output)
            events = self._parsers[choice].push(completion.text)
            if completion.finish_reason is not None:
                events += self._parsers[choice].close()
            self._said(choice, events, len(completion.token_ids), completion)
            if completion.finish_reason is not None:
                reason: str = completion.finish_reason
                if reason == "stop" and self._called[choice]:
                    reason = "tool_calls"
                self._sink.ended(choice, reason, completion.stop_reason)

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        self.usage.completion_tokens += num_tokens
        choice = prompt_index * self._n
        self._said(choice, self._parsers[choice].push(text), num_tokens, None)

    def finish(self) -> None:
        self._sink.finish(self.usage)

    def fail(self, error: ApiError) -> None:
        self._sink.fail(error)

    def _said(
        self,
        choice: int,
        events: list[Event],
        num_tokens: int,
        completion: CompletionOutput | None,
    ) -> None:
        for event in events:
            self._is_thinking[choice] = isinstance(event, Reasoning)
            self._called[choice] |= isinstance(event, ToolCallBegin)
        if self._is_thinking[choice]:  # tokens without an event count as what came before them
            self.usage.reasoning_tokens += num_tokens
        self._sink.said(choice, events, completion)


@dataclass(slots=True)
class CollectedCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CollectedMessage:
    """One choice, whole."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[CollectedCall] = field(default_factory=list)
    logprobs: SampleLogprobs = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class MessageCollector:
    """An `AnswerSink` for answers that are sent whole."""

    def __init__(self, call: Call) -> None:
        self.messages = [CollectedMessage() for _ in range(call.num_choices)]
        self.prompts: list[RequestOutput | None] = [None] * len(call.prompts)
        self.usage = Usage(call.shows_cached)
        self._n = call.params.n

    def opened(self, choice: int, output: RequestOutput) -> None:
        self.prompts[choice // self._n] = output

    def said(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        message = self.messages[choice]
        for event in events:
            match event:
                case Content(text):
                    message.content.append(text)
                case Reasoning(text):
                    message.reasoning.append(text)
                case ToolCallBegin(_, call_id, name):
                    message.tool_calls.append(CollectedCall(call_id, name))
                case ToolCallArguments(index, text):
                    message.tool_calls[index].arguments.append(text)
        if completion is not None:
            message.logprobs.extend(completion.logprobs or ())
            message.token_ids.extend(completion.token_ids)

    def ended(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        self.messages[choice].finish_reason = finish_reason
        self.messages[choice].stop_reason = stop_reason

    def finish(self, usage: Usage) -> None:
        self.usage = usage

    def fail(self, error: ApiError) -> None:
        pass  # `Generation.wait` raises it
