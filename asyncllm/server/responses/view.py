"""OpenAI's response: its output items, status, usage, and the request fields that it repeats."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from asyncllm.outputs import SampleLogprobs
from asyncllm.server.http.errors import ApiError
from asyncllm.server.inputs.call import Call, Usage
from asyncllm.server.outputs.logprobs import TokenNames, chat_logprobs
from asyncllm.server.outputs.parts import OutputPart, PartsCollector
from asyncllm.server.responses.protocol import ResponsesRequest

_FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponseView:
    """Renders one response, in the making or done."""

    def __init__(self, request: ResponsesRequest, call: Call, names: TokenNames) -> None:
        reasoning = request.reasoning
        self.summarizes = reasoning is not None and bool(
            reasoning.summary or reasoning.generate_summary
        )
        self.is_background = bool(request.background)
        self.shows_logprobs = call.params.logprobs is not None
        self._call = call
        self._names = names
        self._unique = call.id.removeprefix("resp_")
        self._request_fields = _request_fields(request, call)

    def body(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """`fields`: of this status; the others are null."""
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._call.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self._request_fields,
            **fields,
        }

    def whole(self, answer: PartsCollector) -> dict[str, Any]:
        last = "incomplete" if answer.finish_reason == "length" else "completed"
        output = [self.item(part, "completed") for part in answer.parts]
        if output:
            output[-1]["status"] = last
        return self.ended(answer.finish_reason, output, answer.usage)

    def ended(
        self, finish_reason: str, output: list[dict[str, Any]], usage: Usage
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"usage": usage_fields(usage)}
        if finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            return self.body("incomplete", output, incomplete_details=details, **fields)
        return self.body("completed", output, completed_at=int(time.time()), **fields)

    def failed(self, error: ApiError, output: list[dict[str, Any]]) -> dict[str, Any]:
        code = _FAILURE_CODES.get(error.status, "server_error")
        return self.body("failed", output, error={"code": code, "message": error.message})

    def cut_off(self, parts: list[OutputPart]) -> list[dict[str, Any]]:
        """The output so far; its last item is incomplete."""
        last = parts[-1:]
        return [self.item(part, "incomplete" if part in last else "completed") for part in parts]

    def item_id(self, part: OutputPart) -> str:
        return f"{_ID_PREFIXES[part.kind]}_{self._unique}_{part.index}"

    def item(self, part: OutputPart, status: str) -> dict[str, Any]:
        head = {"id": self.item_id(part), "status": status}
        match part.kind:
            case "text":
                content = [self.text_part(part)]
                return {**head, "type": "message", "role": "assistant", "content": content}
            case "reasoning":
                content = [self.reasoning_part(part)]
                shown, other = ("summary", "content") if self.summarizes else ("content", "summary")
                return {**head, "type": "reasoning", shown: content, other: []}
            case "call":
                called = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
                return {**head, "type": "function_call", **called}

    def empty_item(self, part: OutputPart) -> dict[str, Any]:
        """Before its first text."""
        item = self.item(part, "in_progress")
        return item | {key: [] for key in ("content", "summary") if key in item}

    def text_part(self, part: OutputPart) -> dict[str, Any]:
        logprobs = self.logprobs(part.logprobs)
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def reasoning_part(self, part: OutputPart) -> dict[str, Any]:
        return {"type": "summary_text" if self.summarizes else "reasoning_text", "text": part.text}

    def logprobs(self, positions: SampleLogprobs) -> list[dict[str, Any]]:
        return chat_logprobs(positions, self._call.params, self._names)["content"]


def usage_fields(usage: Usage) -> dict[str, Any]:
    counts = usage.as_dict()
    cached = (counts["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }


def _request_fields(request: ResponsesRequest, call: Call) -> dict[str, Any]:
    """The request's fields that a response repeats, with the defaults in force."""
    reasoning, text = request.reasoning, request.text
    text_format = msgspec.to_builtins(text.format) if text and text.format else {"type": "text"}
    return {
        "model": call.model,
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and (reasoning.summary or reasoning.generate_summary),
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": call.params.temperature,
        "text": {"format": text_format, "verbosity": (text and text.verbosity) or "medium"},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": [{"strict": None, "parameters": None, **tool} for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": call.params.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
