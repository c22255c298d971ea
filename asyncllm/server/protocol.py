"""Requests of chat, completions and tokenize: OpenAI's fields and vLLM's.

`None` means "not given" for every field, so a client may send null. Ranges are checked by
`SamplingParams`, the one validator. A field typed `Any` that no code reads cannot change the
output and is accepted and ignored; one that would change it is refused by inputs/refusals.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against a listener on the wire: TLS hides it


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """No constraint."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct):
    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None  # none: any JSON object
    strict: bool | None = None  # held to it either way


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag"):
    """vLLM's: `format`, or else `structures` and `triggers`."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's: one of the first six. An unknown field would be a constraint that does not hold."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that chat and completions share."""

    model: str | None = None

    # SamplingParams fields under their own names: see inputs/sampling.py.
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    logit_bias: dict[str, Any] | None = None  # numbers: SamplingParams sees to that
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: dict[str, int] | None = None
    thinking_token_budget: int | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Streaming and scheduling.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # Accepted and ignored: they do not change the output.
    user: Any = None
    metadata: Any = None
    request_id: Any = None
    session_id: Any = None
    service_tier: Any = None
    stream_interval: Any = None
    return_token_offsets: Any = None  # vLLM: only on its render routes
    media_io_kwargs: Any = None
    return_mm_kwargs: Any = None  # vLLM: only on its render routes
    routed_experts_prompt_start: Any = None  # of what --enable-return-routed-experts returns

    # Refused where they would change the output.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    watermarking: bool | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolChoice = Literal["none", "auto", "required"]


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # The chat template's arguments.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None

    # Tools stay the dicts that they came as: the template prints them. Read by inputs/prompts.py.
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Literal["none", "auto"] | dict[str, Any] | None = None

    # The shape of the response.
    include_reasoning: bool | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None

    store: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None

    audio: Any = None
    modalities: Any = None
    moderation: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    mm_processor_kwargs: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    suffix: Any = None
    prompt_embeds: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages` with the chat template's arguments."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
