"""Requests of /v1/messages: Anthropic's fields, and those of vLLM that it lacks.

Ranges are checked by `SamplingParams`, what a block may hold by `chat_request.py`. A field typed
`Any` that no code reads cannot change the output; one that would change it is in `REFUSED`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asyncllm.server.inputs.refusals import Refusals, is_empty
from asyncllm.server.protocol import ReasoningEffort

Block = dict[str, Any]


class InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ThinkingConfig(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None  # a summary is all of it


class ToolUseChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonOutput(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: ReasoningEffort | None = None
    format: JsonOutput | None = None
    task_budget: Any = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The fields that make the prompt."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None  # an older place of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM

    # Accepted and ignored: they do not change the output.
    cache_control: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    billing_policy: Any = None

    # Refused where they would change the output.
    context_management: dict[str, Any] | None = None
    compaction: Any = None
    mcp_servers: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    # vLLM's
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # Accepted and ignored: they do not change the output.
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None

    # Refused where they would change the output.
    container: Any = None
    fallbacks: Any = None
    thread: Any = None


def _keeps_all(value: dict[str, Any]) -> bool:
    """Edits that edit nothing: some clients send one with every request."""
    edits = value.get("edits") or []
    return isinstance(edits, list) and all(
        isinstance(edit, dict)
        and edit.get("type") == "clear_thinking_20251015"
        and edit.get("keep") == "all"
        for edit in edits
    )


REFUSED_IN_PROMPT: Refusals = {
    "context_management": _keeps_all,
    "compaction": is_empty,
    "mcp_servers": is_empty,
}
REFUSED: Refusals = {
    **REFUSED_IN_PROMPT,
    "container": is_empty,
    "fallbacks": is_empty,
}
