"""An answer as Anthropic's message: its blocks, why it stopped, what it cost."""

from __future__ import annotations

from typing import Any

import orjson

from asyncllm.server.answer_parts import AnswerPart, PartsCollector
from asyncllm.server.call import Call
from asyncllm.server.messages.answer_types import StopReason
from asyncllm.server.usage import Usage


class MessageView:
    """Renders one message. `cut_off`: the stop reason of an answer that ended for its length."""

    def __init__(self, call: Call, hides_thinking: bool, cut_off: StopReason) -> None:
        self.hides_thinking = hides_thinking
        self.shows_cached = call.shows_cached
        self._call = call
        self._cut_off = cut_off

    def head(self) -> dict[str, Any]:
        """A message that has not begun."""
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def body(self, answer: PartsCollector) -> dict[str, Any]:
        return {
            **self.head(),
            "content": [_block(part, self.hides_thinking) for part in answer.parts],
            **self.stop(answer.finish_reason, answer.stop_reason),
            "usage": usage_fields(answer.usage),
        }

    def stop(self, finish_reason: str, stop_reason: int | str | None) -> dict[str, Any]:
        if finish_reason == "stop" and isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        reasons = {"tool_calls": "tool_use", "length": self._cut_off}
        return {"stop_reason": reasons.get(finish_reason, "end_turn"), "stop_sequence": None}


def empty_block(part: AnswerPart) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text", "text": "", "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Tokens that the cache had are not input tokens here."""
    counts = usage.as_dict()
    cached = (counts["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _block(part: AnswerPart, hides_thinking: bool) -> dict[str, Any]:
    block = empty_block(part)
    match part.kind:
        case "text":
            block["text"] = part.text
        case "reasoning":
            block["thinking"] = "" if hides_thinking else part.text
        case "call":
            block["input"] = _arguments(part.text)
    return block


def _arguments(text: str) -> Any:
    """A call that was cut off has no whole JSON: then there are none."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
