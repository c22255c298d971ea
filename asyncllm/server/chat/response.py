"""One chat's response: chat.completion as a body, and the chunks of its stream.

`ChatView` is a `ChunkShape` for output that is all content. `ChatStream` streams parsed output:
each event of the parser is a chunk; a plain piece of content or reasoning costs one encoded string,
all around it is rendered once. What a step brings beside its text (logprobs, token ids, running
usage) goes with its first chunk, or waits for the next where the parser held the text back.
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
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.call import SYSTEM_FINGERPRINT, Call, Usage
from asyncllm.server.inputs.output_format import message_text
from asyncllm.server.inputs.prompts import is_named
from asyncllm.server.outputs.chunks import ChoiceFrames, ChunkOptions, TextPlace
from asyncllm.server.outputs.consumers import CollectedCall, CollectedChoice, MessageCollector
from asyncllm.server.outputs.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from asyncllm.server.protocol import ChatRequest, StreamOptions

SERVICE_TIER = "default"  # the only one


OBJECT = "chat.completion.chunk"
CONTENT = TextPlace(OBJECT, b'"delta":{"content":', b"}")
REASONING = TextPlace(OBJECT, b'"delta":{"reasoning":', b"}")


class ChatView:
    place = CONTENT

    def __init__(
        self, request: ChatRequest, call: Call, names: TokenNames, role: str = "assistant"
    ) -> None:
        """`role`: the role of a new message."""
        self._request = request
        self._call = call
        self._names = names
        begins = request.add_generation_prompt is not False and not request.continue_final_message
        last = request.messages[-1] if request.messages else {}
        self._role = role if begins else last.get("role", role)
        self._echo = message_text(last) if _echoes(request, self._role) else ""
        self._is_legacy = bool(request.functions)
        self.include_reasoning = request.include_reasoning is not False

    def finish_reason(self, reason: str | None) -> str | None:
        """Calls of a tool that the request names end with "stop", as at OpenAI."""
        if reason != "tool_calls":
            return reason
        if is_named(self._request):
            return "stop"
        return "function_call" if self._is_legacy else reason

    # The stream

    def opening(
        self, frames: ChoiceFrames, output: RequestOutput, usage: dict[str, Any] | None
    ) -> bytes:
        delta = {"role": self._role, "content": ""}
        choice = {"delta": delta, "logprobs": None, "finish_reason": None}
        prompt_text = output.prompt if self._request.return_prompt_text else None
        prompt_ids = output.prompt_token_ids if self._call.return_token_ids else None
        opening = frames.choice(
            choice, prompt_token_ids=prompt_ids, prompt_text=prompt_text, usage=usage
        )
        return opening + frames.full(self._echo, None, usage=usage) if self._echo else opening

    def text(self, completion: CompletionOutput) -> str:
        return completion.text

    def logprobs(self, choice_index: int, completion: CompletionOutput) -> Any:
        return self.render_logprobs(completion.logprobs or [])

    def render_logprobs(self, positions: SampleLogprobs) -> Any:
        """None where there are none."""
        if self._call.params.logprobs is None or not positions:
            return None
        return chat_logprobs(positions, self._call.params, self._names)

    def token_ids(self, completion: CompletionOutput) -> list[int]:
        return completion.token_ids

    def call_begin(self, index: int, call_id: str, name: str) -> dict[str, Any]:
        """The first delta of a call."""
        function = {"name": name, "arguments": ""}
        if self._is_legacy:
            return {"function_call": function}
        call = {"index": index, "id": call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def call_arguments(self, index: int, text: str) -> dict[str, Any]:
        function = {"arguments": text}
        if self._is_legacy:
            return {"function_call": function}
        return {"tool_calls": [{"index": index, "function": function}]}

    # The body

    def body(self, answer: MessageCollector) -> dict[str, Any]:
        prompt = answer.prompts[0]
        assert prompt is not None, "a finished output had a first one"
        returns_ids = self._call.return_token_ids
        return {
            "id": self._call.id,
            "object": "chat.completion",
            "created": self._call.created,
            "model": self._call.model,
            "choices": [self._choice(message) for message in answer.messages],
            "usage": answer.usage.as_dict(),
            "service_tier": SERVICE_TIER,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "prompt_logprobs": prompt_logprobs(prompt.prompt_logprobs, self._names),
            "prompt_token_ids": prompt.prompt_token_ids if returns_ids else None,
            "prompt_text": prompt.prompt if self._request.return_prompt_text else None,
            "kv_transfer_params": None,
        }

    def _choice(self, message: CollectedChoice) -> dict[str, Any]:
        return {
            "index": message.index,
            "message": self._message(message),
            "logprobs": self.render_logprobs(message.logprobs),
            "finish_reason": self.finish_reason(message.finish_reason),
            "stop_reason": message.stop_reason,
            "token_ids": message.token_ids if self._call.return_token_ids else None,
        }

    def _message(self, message: CollectedChoice) -> dict[str, Any]:
        content = self._echo + message.text
        reasoning = "".join(message.reasoning) if self.include_reasoning else ""
        fields: dict[str, Any] = {
            "role": self._role,
            "content": content if content or not message.tool_calls else None,
            "refusal": None,
            "annotations": [],
            "reasoning": reasoning or None,
        }
        if message.tool_calls and self._is_legacy:
            fields["function_call"] = _function(message.tool_calls[0])
        elif message.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _function(call)}
                for call in message.tool_calls
            ]
        return fields


def _function(call: CollectedCall) -> dict[str, str]:
    return {"name": call.name, "arguments": "".join(call.arguments)}


def _echoes(request: ChatRequest, role: str) -> bool:
    """As in vLLM: the last message comes before the output, if both have one role."""
    return bool(request.echo and request.messages and request.messages[-1].get("role") == role)


class _Choice:
    """One choice's frames, and the fields that its next chunk takes along."""

    def __init__(self, call: Call, index: int) -> None:
        self.content = ChoiceFrames(call, index, CONTENT)
        self.reasoning = ChoiceFrames(call, index, REASONING)
        self.num_tokens = 0
        self.opening = b""
        self.last_delta: dict[str, Any] = {}  # told with the finish_reason
        self.logprobs: SampleLogprobs = []
        self.token_ids: list[int] = []


class ChatStream:
    def __init__(
        self,
        sse: SSEStream,
        call: Call,
        view: ChatView,
        options: StreamOptions | None,
        usage: Usage,
    ) -> None:
        """`usage` is the `ParsedOutput`'s, which counts before it emits."""
        self._sse = sse
        self._usage = usage
        self._view = view
        self._options = ChunkOptions(sse, options)
        self._plain = not call.wants_outputs and call.params.logprobs is None
        self._includes_reasoning = view.include_reasoning
        self._wants_token_ids = call.return_token_ids
        self._choices = [_Choice(call, i) for i in range(call.num_choices)]

    def begin_choice(self, choice: int, output: RequestOutput) -> None:
        state = self._choices[choice]
        state.opening = self._view.opening(state.content, output, self._running_usage(state))

    def emit(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        state = self._choices[choice]
        if not self._includes_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if completion is not None and completion.finish_reason == "length" and events:
            *events, last = events
            state.last_delta = self._delta(last)
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

    def end_choice(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        state = self._choices[choice]
        end = {
            "finish_reason": self._view.finish_reason(finish_reason),
            "stop_reason": stop_reason,
        }
        self._sse.push(self._full_frame(state, state.last_delta, end))

    def finish(self, usage: Usage) -> None:
        self._options.finish(self._choices[0].content.usage, usage)

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
        return state.content.choice(fields, usage=self._running_usage(state))

    def _running_usage(self, state: _Choice) -> dict[str, Any] | None:
        if not self._options.running_usage:
            return None
        return self._usage.of_choice(0, state.num_tokens)

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
