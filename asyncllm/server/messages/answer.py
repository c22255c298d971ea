"""An answer as Anthropic's message: its blocks, why it stopped, what it cost."""

from __future__ import annotations

from typing import Any

import orjson

from asyncllm.server.answer_parts import AnswerPart, PartsCollector
from asyncllm.server.call import Call
from asyncllm.server.usage import Usage

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


def message_body(call: Call, answer: PartsCollector, hide_thinking: bool) -> dict[str, Any]:
    return {
        **message_head(call),
        "content": [_block(part, hide_thinking) for part in answer.parts],
        **stop_fields(answer.finish_reason, answer.stop_reason),
        "usage": usage_fields(answer.usage),
    }


def message_head(call: Call) -> dict[str, Any]:
    """A message that has not begun."""
    return {
        "id": call.id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def empty_block(part: AnswerPart) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text", "text": "", "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def stop_fields(finish_reason: str, stop_reason: int | str | None) -> dict[str, Any]:
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS.get(finish_reason, "end_turn"), "stop_sequence": None}


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


def _block(part: AnswerPart, hide_thinking: bool) -> dict[str, Any]:
    block = empty_block(part)
    match part.kind:
        case "text":
            block["text"] = part.text
        case "reasoning":
            block["thinking"] = "" if hide_thinking else part.text
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
