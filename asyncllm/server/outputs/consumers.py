"""Consumers of a generation that do not write chunks: parsed into events, or collected.

`ParsedOutput` reads the engine's deltas by a parser per choice; an `EventSink` behind it streams
the events in the shape of its API or, as `MessageCollector` does, adds them up. `CollectedOutput`
adds up deltas that need no parser.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from asyncllm.engine.logprobs import MAX_PROMPT_LOGPROB_ENTRIES
from asyncllm.formats.events import (
    AnswerParser,
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from asyncllm.outputs import CompletionOutput, PromptLogprobs, RequestOutput, SampleLogprobs
from asyncllm.server.http.errors import ApiError, bad_request
from asyncllm.server.inputs.call import Call, Usage


class EventSink(Protocol):
    """Receives events on the loop, in the middle of a step: must not block. Ends by finish or fail.

    `choice` is the choice's index in the response.
    """

    def begin_choice(self, choice: int, output: RequestOutput) -> None:
        """Called before the choice's first events."""
        ...

    def emit(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        """Take a step's events, possibly none. `completion`: where it brings more than text."""
        ...

    def end_choice(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        """Called after its last events; "tool_calls" where the model stopped after calls."""
        ...

    def finish(self, usage: Usage) -> None: ...

    def fail(self, error: ApiError) -> None: ...


class PlainParser:
    """The parser of a format with no markers: all text is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def close(self) -> list[Event]:
        return []


class ParsedOutput:
    """A `Consumer` that reads each choice with the call's own parser."""

    def __init__(self, call: Call, sink: EventSink, usage: Usage | None = None) -> None:
        """`usage`: to count in, for a sink that reads it meanwhile."""
        new_parser = call.new_parser or PlainParser
        self.usage = usage or Usage(call.shows_cached)
        self._n = call.params.n
        self._sink = sink
        self._parsers: list[AnswerParser] = [new_parser() for _ in range(call.num_choices)]
        self._opened = [False] * call.num_choices
        self._called = [False] * call.num_choices
        self._is_reasoning = [False] * call.num_choices

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)
        for completion in output.outputs:
            choice = prompt_index * self._n + completion.index
            if not self._opened[choice]:
                self._opened[choice] = True
                self._sink.begin_choice(choice, output)
            events = self._parsers[choice].push(completion.text)
            if completion.finish_reason is not None:
                events += self._parsers[choice].close()
            self._emit(choice, events, len(completion.token_ids), completion)
            if completion.finish_reason is not None:
                reason: str = completion.finish_reason
                if reason == "stop" and self._called[choice]:
                    reason = "tool_calls"
                self._sink.end_choice(choice, reason, completion.stop_reason)

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        self.usage.completion_tokens += num_tokens
        choice = prompt_index * self._n
        self._emit(choice, self._parsers[choice].push(text), num_tokens, None)

    def finish(self) -> None:
        self._sink.finish(self.usage)

    def fail(self, error: ApiError) -> None:
        self._sink.fail(error)

    def _emit(
        self,
        choice: int,
        events: list[Event],
        num_tokens: int,
        completion: CompletionOutput | None,
    ) -> None:
        for event in events:
            self._is_reasoning[choice] = isinstance(event, Reasoning)
            self._called[choice] |= isinstance(event, ToolCallBegin)
        if self._is_reasoning[choice]:  # tokens without an event count as those before them
            self.usage.reasoning_tokens += num_tokens
        self._sink.emit(choice, events, completion)


@dataclass(slots=True)
class CollectedCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CollectedChoice:
    """One complete choice; a completion has no reasoning and no calls."""

    index: int
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[CollectedCall] = field(default_factory=list)
    logprobs: SampleLogprobs = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.content)


class MessageCollector:
    """An `EventSink` that collects messages, for responses that are not streamed."""

    def __init__(self, call: Call) -> None:
        self.messages = [CollectedChoice(i) for i in range(call.num_choices)]
        self.prompts: list[RequestOutput | None] = [None] * len(call.prompts)
        self.usage = Usage(call.shows_cached)
        self._n = call.params.n

    def begin_choice(self, choice: int, output: RequestOutput) -> None:
        self.prompts[choice // self._n] = output

    def emit(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
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

    def end_choice(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        self.messages[choice].finish_reason = finish_reason
        self.messages[choice].stop_reason = stop_reason

    def finish(self, usage: Usage) -> None:
        self.usage = usage

    def fail(self, error: ApiError) -> None:
        pass  # `Generation.wait` raises it


@dataclass(slots=True)
class CollectedPrompt:
    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: PromptLogprobs | None = None


class CollectedOutput:
    """A `Consumer` for one JSON body."""

    def __init__(self, call: Call) -> None:
        self.choices = [CollectedChoice(i) for i in range(call.num_choices)]
        self.prompts = [CollectedPrompt() for _ in call.prompts]
        self.usage = Usage(call.shows_cached, call.prompt_only)
        self._n = call.params.n
        self._params = call.params
        self._num_entries = 0  # of prompt_logprobs

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)
        self._add_prompt(self.prompts[prompt_index], output)
        for completion in output.outputs:
            choice = self.choices[prompt_index * self._n + completion.index]
            choice.content.append(completion.text)
            choice.logprobs.extend(completion.logprobs or ())
            choice.token_ids.extend(completion.token_ids)
            if completion.finish_reason is not None:
                choice.finish_reason = completion.finish_reason
                choice.stop_reason = completion.stop_reason

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        self.usage.completion_tokens += num_tokens
        self.choices[prompt_index * self._n].content.append(text)

    def finish(self) -> None:
        pass

    def fail(self, error: ApiError) -> None:
        pass  # `Generation.wait` raises it

    def prompt_of(self, choice: CollectedChoice) -> CollectedPrompt:
        return self.prompts[choice.index // self._n]

    def _add_prompt(self, prompt: CollectedPrompt, output: RequestOutput) -> None:
        prompt.text = output.prompt
        prompt.token_ids = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            prompt.logprobs = output.prompt_logprobs
            self._check_num_entries(len(output.prompt_logprobs))

    def _check_num_entries(self, num_positions: int) -> None:
        """Each prompt is within the engine's limit; each choice shows its prompt's again."""
        params = self._params
        assert params.prompt_logprobs is not None, "they were requested"
        self._num_entries += num_positions * (1 + params.prompt_logprobs) * params.n
        if self._num_entries > MAX_PROMPT_LOGPROB_ENTRIES:
            what = f"prompt_logprobs of all choices are over {MAX_PROMPT_LOGPROB_ENTRIES} entries"
            raise bad_request(f"{what}: ask for fewer, or send less", "prompt_logprobs")
