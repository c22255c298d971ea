"""Requests of /v1/responses: OpenAI's fields, and vLLM's for sampling.

The fields of `GenerationRequest` go into the chat request as they are; those that have another name
in this API, or cannot be reported by it, are in `REFUSED`. Items are checked by `items.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asyncllm.server.inputs.refusals import Refusals, is_empty
from asyncllm.server.protocol import (
    GenerationRequest,
    JsonObjectFormat,
    ReasoningEffort,
    TextFormat,
)

Verbosity = Literal["low", "medium", "high"]


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningConfig(msgspec.Struct):
    """With a `summary` what the model thought is told as the summary, else as content."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | None = None  # its older name
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesRequest(GenerationRequest, kw_only=True):
    # What makes the prompt.
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM
    truncation: Literal["auto", "disabled"] | None = None

    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    top_logprobs: int | None = None
    user: str | None = None

    # Accepted and ignored: they do not change the output.
    access_programs: Any = None
    image: Any = None
    max_tool_calls: int | None = None  # of tools that the server runs
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: str | None = None

    # Refused where they would change the output.
    conversation: Any = None
    personality: Any = None
    context_management: Any = None
    moderation: Any = None
    prompt: Any = None


def _never(value: Any) -> bool:
    return False


REFUSED_IN_PROMPT: Refusals = {"conversation": is_empty, "personality": is_empty}
REFUSED: Refusals = {
    **REFUSED_IN_PROMPT,
    "context_management": is_empty,
    "moderation": is_empty,
    "prompt": is_empty,
    "n": lambda value: value == 1,
    "max_tokens": _never,  # max_output_tokens
    "response_format": _never,  # text.format
    "prompt_logprobs": _never,
    "return_token_ids": is_empty,
}
